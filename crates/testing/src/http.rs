//! HTTP as the stand-ins for servers speak it: requests with a length, answered one after the other on each connection.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

pub(crate) struct Request {
    pub(crate) method: String,
    /// Without the slash that it begins with.
    pub(crate) path: String,
    pub(crate) query: BTreeMap<String, String>,
    /// By names in small letters.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

pub(crate) struct Answer {
    pub(crate) status: &'static str,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
}

/// Has each connection answered on a thread of its own until `answer_one` returns `None`. Returns the server's URL; it runs until the process ends.
///
/// *Panics*: if loopback cannot be used.
pub(crate) fn serve(
    answer_one: impl Fn(&TcpStream) -> Option<()> + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    let answer_one = Arc::new(answer_one);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answer_one = answer_one.clone();
            thread::spawn(move || while answer_one(&stream).is_some() {});
        }
    });
    format!("http://{address}")
}

impl Request {
    pub(crate) fn read(stream: &TcpStream) -> Option<Self> {
        let mut from = BufReader::with_capacity(1, stream);
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            from.read_line(&mut line).ok()?;
            let Some((name, value)) = line.split_once(':') else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let len: usize = headers
            .get("content-length")
            .map_or(Ok(0), |len| len.parse())
            .ok()?;
        let mut body = vec![0; len];
        from.read_exact(&mut body).ok()?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query = query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                (name.to_owned(), decoded(value))
            });
        Some(Self {
            method,
            path: decoded(path.trim_start_matches('/')),
            query: query.collect(),
            headers,
            body,
        })
    }

    pub(crate) fn query(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }
}

/// Text of a URL without its percent signs.
fn decoded(text: &str) -> String {
    let (first, rest) = text.split_once('%').unwrap_or((text, ""));
    let mut bytes = first.as_bytes().to_vec();
    for part in rest.split('%').filter(|part| part.len() >= 2) {
        let (code, rest) = part.split_at(2);
        bytes.extend(u8::from_str_radix(code, 16).ok());
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Answer {
    pub(crate) fn encode(&self, is_head: bool) -> Vec<u8> {
        let mut text = format!(
            "HTTP/1.1 {}\r\nContent-Length: {}\r\n",
            self.status,
            self.body.len()
        );
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += "\r\n";
        let body = if is_head { &[][..] } else { &self.body };
        [text.as_bytes(), body].concat()
    }
}
