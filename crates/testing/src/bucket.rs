//! An object store with one bucket, `bucket`: the operations of S3 and of Google Cloud Storage that checkpoints use, over HTTP on
//! loopback, with faults.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::http::{Answer, Request, serve};

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server answers that it has failed.
    Failed,
    /// The server refuses it.
    Denied,
    /// The connection ends in the middle of the answer.
    Cut,
    /// There is no answer as long as the bucket is [held](Bucket::hold).
    Held,
}

/// Chooses the fault of a request from its method and path with query.
pub type Faults = dyn FnMut(&str, &str) -> Option<Fault> + Send;

#[derive(Default)]
struct Shared {
    contents: Mutex<Contents>,
    changed: Condvar,
    is_held: AtomicBool,
    /// Key that requests must be signed with; `None`: any.
    key: Option<String>,
    uploads: AtomicUsize,
}

#[derive(Default)]
struct Contents {
    objects: BTreeMap<String, Vec<u8>>,
    /// Objects in parts, by upload.
    uploads: BTreeMap<String, BTreeMap<usize, Vec<u8>>>,
    requests: Vec<String>,
    faults: Option<Box<Faults>>,
}

/// The server; it answers until the process ends.
pub struct Bucket {
    shared: Arc<Shared>,
    endpoint: String,
}

impl Bucket {
    /// Starts a server. `key` is the one that requests must be signed with, if any.
    ///
    /// *Panics*: if loopback cannot be used.
    pub fn start(key: Option<&str>) -> Self {
        let shared = Arc::new(Shared {
            key: key.map(str::to_owned),
            ..Shared::default()
        });
        let server = shared.clone();
        Self {
            shared,
            endpoint: serve(move |stream| answer_one(&server, stream)),
        }
    }

    /// Its address, as `AWS_ENDPOINT_URL` takes it.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Chooses the faults from now on.
    pub fn set_faults(&self, faults: impl FnMut(&str, &str) -> Option<Fault> + Send + 'static) {
        self.contents().faults = Some(Box::new(faults));
    }

    /// Whether requests with [`Fault::Held`] wait.
    pub fn hold(&self, is_held: bool) {
        self.shared.is_held.store(is_held, Ordering::Relaxed);
        let _contents = self.contents();
        self.shared.changed.notify_all();
    }

    /// The names of the objects, and their bytes.
    pub fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        self.contents().objects.clone()
    }

    /// Puts, replaces or removes an object.
    pub fn set(&self, name: &str, bytes: Option<Vec<u8>>) {
        let mut contents = self.contents();
        match bytes {
            Some(bytes) => contents.objects.insert(name.into(), bytes),
            None => contents.objects.remove(name),
        };
    }

    /// The requests so far: method and path with query.
    pub fn requests(&self) -> Vec<String> {
        self.contents().requests.clone()
    }

    /// Waits until the names of the objects satisfy `wanted`; returns whether they do within `limit`.
    pub fn wait_for(&self, limit: Duration, wanted: impl Fn(&[&str]) -> bool) -> bool {
        let fits = |contents: &mut Contents| {
            let names: Vec<&str> = contents.objects.keys().map(String::as_str).collect();
            wanted(&names)
        };
        let waited = self
            .shared
            .changed
            .wait_timeout_while(self.contents(), limit, |contents| !fits(contents));
        let (mut contents, _) = waited.unwrap_or_else(PoisonError::into_inner);
        fits(&mut contents)
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        lock(&self.shared)
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Contents> {
    shared
        .contents
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Answers one request of a connection; `None` once it has ended.
fn answer_one(shared: &Shared, stream: &TcpStream) -> Option<()> {
    let request = Request::read(stream)?;
    let fault = {
        let mut contents = lock(shared);
        let line = line(&request);
        contents.requests.push(format!("{} {line}", request.method));
        let faults = contents.faults.as_mut();
        faults.and_then(|faults| faults(&request.method, &line))
    };
    if fault == Some(Fault::Held) {
        let is_held = |_: &mut Contents| shared.is_held.load(Ordering::Relaxed);
        drop(shared.changed.wait_while(lock(shared), is_held));
    }
    let answer = match fault {
        Some(Fault::Failed) => Answer::error("500 Internal Server Error", "InternalError"),
        Some(Fault::Denied) => Answer::error("403 Forbidden", "AccessDenied"),
        _ => shared.answer(&request),
    };
    shared.changed.notify_all();
    let is_head = request.method == "HEAD";
    let mut bytes = answer.encode(is_head);
    if fault == Some(Fault::Cut) {
        bytes.truncate(bytes.len() / 2);
    }
    let mut to = stream;
    to.write_all(&bytes).ok()?;
    if fault == Some(Fault::Cut) {
        let _ = stream.shutdown(Shutdown::Both);
        return None;
    }
    Some(())
}

/// Path and query of a request.
fn line(request: &Request) -> String {
    let query = request.query.iter();
    let query: Vec<String> = query
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    format!("/{}?{}", request.path, query.join("&"))
}

impl Answer {
    fn new(status: &'static str, body: impl Into<Vec<u8>>) -> Self {
        let headers = vec![
            ("ETag", "\"tag\"".into()),
            ("Last-Modified", "Mon, 23 Nov 2026 12:00:00 GMT".into()),
        ];
        let body = body.into();
        Self {
            status,
            headers,
            body,
        }
    }

    fn error(status: &'static str, code: &str) -> Self {
        let text = format!("<Error><Code>{code}</Code><Message>says the test</Message></Error>");
        Self::new(status, text)
    }
}

impl Shared {
    fn answer(&self, request: &Request) -> Answer {
        let signature = request.headers.get("authorization");
        let signed_with = |key: &String| {
            signature.is_some_and(|signature| signature.contains(&format!("Credential={key}/")))
        };
        if !self.key.as_ref().is_none_or(signed_with) {
            return Answer::error("403 Forbidden", "AccessDenied");
        }
        let (bucket, name) = request.path.split_once('/').unwrap_or((&request.path, ""));
        if bucket != "bucket" {
            return Answer::error("404 Not Found", "NoSuchBucket");
        }
        let mut contents = lock(self);
        let upload = request.query("uploadId").map(str::to_owned);
        match (&*request.method, upload, name) {
            ("GET", _, "") => list(&contents, request.query("prefix").unwrap_or_default()),
            ("GET" | "HEAD", ..) => get(&contents, name, request.headers.get("range")),
            ("POST", None, "") => {
                let body = String::from_utf8_lossy(&request.body);
                let keys = body.split("<Key>").skip(1);
                let keys = keys.filter_map(|rest| Some(rest.split_once("</Key>")?.0));
                let mut deleted = String::new();
                for key in keys {
                    contents.objects.remove(key);
                    deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
                }
                Answer::new("200 OK", format!("<DeleteResult>{deleted}</DeleteResult>"))
            }
            ("POST", None, _) => {
                let id = self.uploads.fetch_add(1, Ordering::Relaxed).to_string();
                contents.uploads.insert(id.clone(), BTreeMap::new());
                let result = format!(
                    "<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>{name}</Key><UploadId>{id}</UploadId>\
                     </InitiateMultipartUploadResult>"
                );
                Answer::new("200 OK", result)
            }
            ("POST", Some(id), _) => match contents.uploads.remove(&id) {
                Some(parts) => {
                    let whole: Vec<u8> = parts.into_values().flatten().collect();
                    contents.objects.insert(name.into(), whole);
                    let result = format!(
                        "<CompleteMultipartUploadResult><Location>x</Location><Bucket>bucket</Bucket><Key>{name}</Key>\
                         <ETag>tag</ETag></CompleteMultipartUploadResult>"
                    );
                    Answer::new("200 OK", result)
                }
                None => Answer::error("404 Not Found", "NoSuchUpload"),
            },
            ("PUT", Some(id), _) => {
                let part = request
                    .query("partNumber")
                    .and_then(|part| part.parse().ok());
                match (contents.uploads.get_mut(&id), part) {
                    (Some(parts), Some(part)) => {
                        parts.insert(part, request.body.clone());
                        Answer::new("200 OK", "")
                    }
                    _ => Answer::error("404 Not Found", "NoSuchUpload"),
                }
            }
            ("PUT", None, _) => {
                contents.objects.insert(name.into(), request.body.clone());
                Answer::new("200 OK", "")
            }
            ("DELETE", Some(id), _) => {
                contents.uploads.remove(&id);
                Answer::new("204 No Content", "")
            }
            ("DELETE", None, _) => match contents.objects.remove(name) {
                Some(_) => Answer::new("204 No Content", ""),
                None => Answer::error("404 Not Found", "NoSuchKey"),
            },
            _ => Answer::error("400 Bad Request", "NotImplemented"),
        }
    }
}

/// The names below a prefix.
fn list(contents: &Contents, prefix: &str) -> Answer {
    let found = contents.objects.iter();
    let found = found.filter(|(name, _)| name.starts_with(prefix));
    let found = found.map(|(name, bytes)| {
        format!(
            "<Contents><Key>{name}</Key><Size>{}</Size><LastModified>2026-11-23T12:00:00.000Z</LastModified></Contents>",
            bytes.len()
        )
    });
    let result = format!(
        "<ListBucketResult>{}</ListBucketResult>",
        found.collect::<String>()
    );
    Answer::new("200 OK", result)
}

/// An object, or a range of it.
fn get(contents: &Contents, name: &str, range: Option<&String>) -> Answer {
    let Some(bytes) = contents.objects.get(name) else {
        return Answer::error("404 Not Found", "NoSuchKey");
    };
    let range = range.and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        let to: usize = to.parse().ok()?;
        Some((from.parse::<usize>().ok()?, (to + 1).min(bytes.len())))
    });
    let Some((from, to)) = range else {
        return Answer::new("200 OK", bytes.clone());
    };
    let Some(part) = bytes.get(from..to) else {
        return Answer::error("416 Range Not Satisfiable", "InvalidRange");
    };
    let mut answer = Answer::new("206 Partial Content", part);
    let content_range = format!("bytes {from}-{}/{}", to - 1, bytes.len());
    answer.headers.push(("Content-Range", content_range));
    answer
}
