//! The pages and their scripts in a headless browser. Machines without one skip these tests.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::*;

const BROWSERS: [&str; 4] = [
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
];
/// A browser that needs longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// What the live update brings.
const NEWS: &str = "<td>4,321</td>";

/// The browser, if there is one.
fn browser() -> Option<&'static str> {
    let path = std::env::var_os("PATH")?;
    let is_there = |name: &&str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    let found = BROWSERS.into_iter().find(is_there);
    if found.is_none() {
        paceline_testing::skipped(format!("no browser: none of {}", BROWSERS.join(", ")));
    }
    found
}

/// A browser with all of its processes, which end with it.
struct Browser(Child);

impl Drop for Browser {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        // It has ended by itself if all is well.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// The document at an address after its scripts have run, and with `more` options.
fn document_at(browser: &str, url: &str, more: &[&str]) -> String {
    let profile = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(more)
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    let mut running = Browser(command.spawn().expect("a browser"));
    let mut stdout = running.0.stdout.take().expect("piped");
    let (told, heard) = std::sync::mpsc::channel();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.read_to_string(&mut text);
        let _ = told.send(read.map(|_| text));
    });
    let text = heard.recv_timeout(PATIENCE);
    drop(running);
    reader.join().expect("no panic");
    text.expect("a browser that ends").expect("a document")
}

/// Between browser and server: passes everything on, has the run go on once the browser has the first event, and ends the
/// stream of events once the browser has the news.
fn relay(server: SocketAddr, metrics: &Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let metrics = metrics.to_owned();
    thread::spawn(move || {
        // The test ends before it does, and the process with the tests ends it.
        for browser in listener.incoming().flatten() {
            let metrics = metrics.clone();
            thread::spawn(move || pass_on(browser, server, &metrics));
        }
    });
    address
}

fn pass_on(mut browser: TcpStream, server: SocketAddr, metrics: &Path) {
    let Ok(mut server) = TcpStream::connect(server) else {
        return;
    };
    let (Ok(mut asked), Ok(mut asks)) = (browser.try_clone(), server.try_clone()) else {
        return;
    };
    let requests = thread::spawn(move || std::io::copy(&mut asked, &mut asks));
    let (mut seen, mut chunk) = (String::new(), [0; 4096]);
    while let Ok(count @ 1..) = server.read(&mut chunk) {
        if browser.write_all(&chunk[..count]).is_err() {
            break;
        }
        seen += &String::from_utf8_lossy(&chunk[..count]);
        let events = seen.matches("\n\n").count();
        if seen.contains("text/event-stream") && events > 0 {
            if !seen.contains(NEWS) {
                let mut file = File::options().append(true).open(metrics).expect("a file");
                file.write_all(step(4321).as_bytes()).expect("written");
            } else if seen.ends_with("\n\n") {
                break;
            }
        }
    }
    for end in [&browser, &server] {
        let _ = end.shutdown(std::net::Shutdown::Both);
    }
    let _ = requests.join();
}

#[test]
fn a_browser_shows_the_list_and_a_comparison() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "one");
    write(folder.path(), "two");
    let server = Server::start(folder.path(), Access::Loopback);
    let url = format!("http://{}", server.address);
    let list = document_at(browser, &format!("{url}/"), &[]);
    for part in [
        "<a href=\"/runs/one/\">one</a>",
        "<td>running, or cut off</td><td>0.5</td>",
        "name=\"run\" form=\"compare\" value=\"two\"",
    ] {
        assert!(list.contains(part), "{part}: {list}");
    }
    // Without the slash too.
    let page = document_at(browser, &format!("{url}/runs/one"), &[]);
    assert!(
        page.contains("<h1>one</h1>") && page.contains("<svg"),
        "{page}"
    );
    let page = document_at(browser, &format!("{url}/compare/?run=two&run=one"), &[]);
    assert!(page.contains("<h1>two, one</h1>"), "{page}");
}

#[test]
fn a_browser_shows_new_steps_by_itself() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "run");
    let server = Server::start(folder.path(), Access::Loopback);
    let metrics = folder.path().join("run/metrics.jsonl");
    let address = relay(server.address, &metrics);
    // Its clock stands still while the stream of events is open.
    let began = Instant::now();
    let budget = ["--virtual-time-budget=2000"];
    let page = document_at(browser, &format!("http://{address}/runs/run/"), &budget);
    assert!(page.contains(NEWS), "after {:?}: {page}", began.elapsed());
    assert!(!page.contains("id=\"lost\" hidden"), "the stream has ended");
}
