//! `paceline gpu serve`: what devices and ranks do, for Prometheus to collect.

mod metrics;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;

use super::live::Feed;
use super::source::WatchArgs;
use crate::exit::{Exit, Failure, note};
use crate::http::{self, Answer, Request};

/// What `paceline gpu serve` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ServeArgs {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9400")]
    pub listen: SocketAddr,
    /// The machine, and how often to look at it.
    #[command(flatten)]
    pub watch: WatchArgs,
}

pub(super) const EXAMPLES: &str = "\
The numbers are at http://ADDRESS:PORT/metrics in Prometheus's text format. Every
client that reaches the port can read them without a password: names of jobs and devices,
and what they do. Only this machine can reach it, unless another address is given.

Examples:
  Let a Prometheus on this machine collect:
    paceline gpu serve
  Let one on the cluster's network collect:
    paceline gpu serve --listen 10.0.0.5:9400";

/// Serves until SIGINT, SIGTERM or SIGHUP.
///
/// *Errors*: the address cannot be had.
pub(super) fn run(args: &ServeArgs) -> Result<Exit, Failure> {
    let listener = http::listen(args.listen)?;
    let failed = |what: &'static str| {
        move |error: io::Error| Failure::environment(format!("{what}: {error}"))
    };
    let stop = http::stop_signal().map_err(failed("signals cannot be heeded"))?;
    let WatchArgs { places, interval } = &args.watch;
    let feed = Feed::start(&places.find(), *interval).map_err(failed("cannot start a thread"))?;
    let address = listener.local_addr().unwrap_or(args.listen);
    note(&format!(
        "serving at http://{address}/metrics, until Ctrl-C"
    ));
    // Unchanged looks are written once, however many ask.
    let page = Mutex::new(Page::default());
    let metrics = || {
        let mut page = page.lock().unwrap_or_else(PoisonError::into_inner);
        page.text(&feed)
    };
    let served = http::serve(listener, stop, |request| answer(request, metrics));
    served.map_err(failed("the server fails"))?;
    Ok(Exit::Done)
}

fn answer(request: &Request<'_>, metrics: impl Fn() -> Arc<[u8]>) -> Answer {
    let elsewhere = "the numbers are at /metrics";
    match request.path {
        // Version 0.0.4 is that of the text format.
        "/metrics" => Answer::found("text/plain; version=0.0.4; charset=utf-8", metrics()),
        "/" => Answer::text("200 OK", elsewhere),
        _ => Answer::text("404 Not Found", elsewhere),
    }
}

/// The text of the newest looks.
#[derive(Debug, Default)]
struct Page {
    of: Option<[Option<Duration>; 2]>,
    is_silent: bool,
    text: Arc<[u8]>,
}

impl Page {
    fn text(&mut self, feed: &Feed) -> Arc<[u8]> {
        let (devices, jobs) = (feed.devices(), feed.jobs());
        let at = [
            devices.latest.as_ref().map(|l| l.at),
            jobs.latest.as_ref().map(|l| l.at),
        ];
        let is_silent = metrics::is_silent(feed.elapsed(), &devices);
        if self.of != Some(at) || self.is_silent != is_silent {
            self.of = Some(at);
            self.is_silent = is_silent;
            // Numbers of a driver that does not answer any more are not passed off as today's.
            let seen = devices.latest.as_deref().filter(|_| !is_silent);
            self.text = metrics::text(seen, jobs.latest.as_deref())
                .into_bytes()
                .into();
        }
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::PlacesArgs;

    #[test]
    fn a_port_that_is_taken_is_an_error_with_a_hint() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let args = ServeArgs {
            listen: taken.local_addr().expect("bound"),
            watch: WatchArgs {
                interval: Duration::from_secs(1),
                places: PlacesArgs::default(),
            },
        };
        let failure = run(&args).expect_err("taken");
        assert_eq!(failure.exit(), Exit::Environment);
        let text = format!("{failure:?}");
        assert!(text.contains("cannot listen at 127.0.0.1:"), "{text}");
        assert!(text.contains("--listen 127.0.0.1:9401"), "{text}");
    }
}
