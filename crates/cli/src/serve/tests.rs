//! Browsers as plain sockets: pages, events, tokens, and what is not there.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use paceline_rendezvous::token::Token;

use super::*;

mod browser;

struct Server {
    address: SocketAddr,
    told: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(folder: &Path, access: Access) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (stop, told) = UnixStream::pair().expect("a pair");
        let pages = Pages::new(folder.to_owned(), Lang::En);
        let thread = thread::spawn(move || {
            let answer = |request: &Request<'_>| answer(&access, &pages, request);
            http::serve(listener, stop, answer).expect("a clean end");
        });
        Self {
            address,
            told,
            thread: Some(thread),
        }
    }

    fn ask(&self, path: &str, more: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("accepted");
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).expect("set");
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n");
        stream.write_all(request.as_bytes()).expect("taken");
        stream
    }

    fn get(&self, path: &str, more: &str) -> String {
        let mut answer = String::new();
        let mut stream = self.ask(path, more);
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.told.write_all(b"x").expect("told");
        let thread = self.thread.take().expect("once");
        thread.join().expect("no panic");
    }
}

fn step(step: u64) -> String {
    format!("{{\"kind\":\"step\",\"step\":{step},\"loss\":0.5,\"seconds\":0.1}}\n")
}

fn write(folder: &Path, name: &str) {
    fs::create_dir_all(folder.join(name)).expect("a folder");
    fs::write(folder.join(name).join("metrics.jsonl"), step(1)).expect("written");
}

#[test]
fn runs_are_listed_and_each_has_its_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = folder.path().join("runs");
    write(&runs, "a <b>");
    fs::create_dir_all(folder.path().join("secret")).expect("a folder");
    fs::write(folder.path().join("secret/metrics.jsonl"), step(1)).expect("written");
    let server = Server::start(&runs, Access::Loopback);
    let list = server.get("/", "");
    let link = "<a href=\"/runs/a%20%3Cb%3E/\">a &lt;b&gt;</a>";
    assert!(list.contains(link), "{list}");
    let row = "<td>running, or cut off</td><td>0.5</td><td>–</td><td>–</td><td>0.1 s</td><td>just now</td>";
    assert!(list.contains(row), "{list}");
    let redirect = server.get("/runs/a%20%3Cb%3E", "");
    assert!(
        redirect.starts_with("HTTP/1.1 303 ")
            && redirect.contains("\r\nLocation: /runs/a%20%3Cb%3E/\r\n"),
        "{redirect}"
    );
    let page = server.get("/runs/a%20%3Cb%3E/", "");
    for part in [
        "200 OK",
        "<section id=\"charts\">",
        "new EventSource",
        "Content-Security-Policy",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    for path in [
        "/runs/b/",
        "/runs/../secret/",
        "/runs/..%2Fsecret/",
        "/metrics.jsonl",
        "/runs/",
        "/runs/b",
        "/compare/?run=b",
    ] {
        assert!(server.get(path, "").starts_with("HTTP/1.1 404 "), "{path}");
    }
}

#[test]
fn chosen_runs_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    for run in ["a <b>", "c"] {
        write(folder.path(), run);
    }
    let server = Server::start(folder.path(), Access::Loopback);
    let page = server.get("/compare/?run=c&run=a+%3Cb%3E&run=c", "");
    assert!(page.contains("<h1>c, a &lt;b&gt;</h1>"), "{page}");
    let mut lines = BufReader::new(server.ask("/compare/events?run=c", "")).lines();
    let event = lines.find_map(|line| Some(line.ok()?.strip_prefix("data: ")?.to_owned()));
    assert!(event.expect("an event").contains("summary"));
    let many: String = (0..9).map(|run| format!("&run={run}")).collect();
    for path in ["/compare/".to_owned(), format!("/compare/?{many}")] {
        let answer = server.get(&path, "");
        assert!(answer.starts_with("HTTP/1.1 400 "), "{path}: {answer}");
    }
}

#[test]
fn the_list_follows_its_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "run");
    let server = Server::start(folder.path(), Access::Loopback);
    let mut lines = BufReader::new(server.ask("/events", "")).lines();
    let mut event = || lines.find_map(|line| Some(line.ok()?.strip_prefix("data: ")?.to_owned()));
    assert!(event().expect("an event").contains("running, or cut off"));
    let metrics = folder.path().join("run/metrics.jsonl");
    let mut metrics = File::options().append(true).open(metrics).expect("a file");
    let stopped = b"{\"kind\":\"stopped\",\"step\":1,\"signal\":\"SIGTERM\"}\n";
    metrics.write_all(stopped).expect("written");
    assert!(event().expect("an event").contains("stopped by SIGTERM"));
}

#[test]
fn a_browser_hears_of_new_steps() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "run");
    let server = Server::start(folder.path(), Access::Loopback);
    let mut lines = BufReader::new(server.ask("/runs/run/events", "")).lines();
    let mut event = || -> Vec<(String, String)> {
        let mut data = lines.by_ref().map(|line| line.expect("a line"));
        let data = data.find_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
        serde_json::from_str(&data.expect("an event")).expect("sections")
    };
    let ids: Vec<String> = event().into_iter().map(|(id, _)| id).collect();
    assert_eq!(
        ids,
        [
            "summary",
            "charts",
            "classes",
            "ranks",
            "steps",
            "incidents",
            "environment",
            "settings"
        ]
    );
    let metrics = folder.path().join("run/metrics.jsonl");
    let mut metrics = File::options().append(true).open(metrics).expect("a file");
    metrics.write_all(step(1234).as_bytes()).expect("written");
    let changed = event();
    let ids: Vec<&str> = changed.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ids, ["summary", "charts"], "only what has changed");
    assert!(changed[0].1.contains("1,234"), "{}", changed[0].1);
}

#[test]
fn beyond_this_machine_the_token_opens_the_pages() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "run");
    let token = Token::generate().expect("a token");
    let hex = token.to_hex();
    let server = Server::start(folder.path(), Access::Token(token, "kept".to_owned()));
    let other = "0".repeat(hex.len());
    for (path, more) in [
        ("/".to_owned(), String::new()),
        ("/runs/run/events".to_owned(), String::new()),
        (format!("/?token={other}"), String::new()),
        ("/".to_owned(), format!("Cookie: kept={other}\r\n")),
    ] {
        let answer = server.get(&path, &more);
        assert!(answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
        assert!(!answer.contains("run/"), "{answer}");
    }
    let answer = server.get(&format!("//runs/run/?token={hex}"), "");
    assert!(answer.starts_with("HTTP/1.1 303 "), "{answer}");
    assert!(answer.contains("\r\nLocation: /runs/run/\r\n"), "{answer}");
    let cookie = format!("Cookie: a=b; kept={hex}\r\n");
    let page = server.get("/runs/run/", &cookie);
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
}

#[test]
fn a_page_of_the_web_cannot_lead_a_browser_of_this_machine_here() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(folder.path(), Access::Loopback);
    let mut stream = TcpStream::connect(server.address).expect("accepted");
    let request = b"GET / HTTP/1.1\r\nHost: evil.example:6500\r\n\r\n";
    stream.write_all(request).expect("taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    assert!(server.get("/", "").contains("There is no run yet."));
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let args = ServeArgs {
        runs: "/nowhere/runs".into(),
        listen: "127.0.0.1:0".parse().expect("an address"),
        lang: None,
    };
    let failure = run(&args).expect_err("no folder");
    assert_eq!(failure.exit(), Exit::Usage);
    assert!(failure.to_string().contains("/nowhere/runs"), "{failure}");
}
