//! HTTP for `object_store`: each request blocks a thread of the runtime, and every step of it has a deadline.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};

/// Time to connect, in seconds, if `object_store` does not say it: it gives metadata servers less.
const CONNECT_SECONDS: u64 = 5;
/// Time without a byte in either direction after which a request failed.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for a request and its answer, of a few MiB at most, on a slow line.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Largest answer; those to `Remote` are smaller.
const BODY_BYTES_MAX: u64 = 128 << 20;

/// Makes clients.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let connect = options.get_config_value(&ClientConfigKey::ConnectTimeout);
        let connect = connect.and_then(|text| text.trim_end_matches('s').parse().ok());
        let config = Agent::config_builder()
            .tls_config(tls())
            // `object_store` judges the status, and signs for one address.
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(Duration::from_secs(
                connect.unwrap_or(CONNECT_SECONDS),
            )))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE))
            .timeout_global(Some(REQUEST_TIMEOUT));
        Ok(HttpClient::new(Client(config.build().into())))
    }
}

/// TLS of an HTTP client: rustls with ring, and the system's certificates.
pub fn tls() -> TlsConfig {
    let provider = rustls::crypto::ring::default_provider();
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(provider))
        // A private server may have a certificate from a private authority.
        .root_certs(RootCerts::PlatformVerifier)
        .build()
}

#[derive(Debug)]
struct Client(Agent);

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let agent = self.0.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let answer = match body.is_empty() {
                true => agent.run(ureq::http::Request::from_parts(parts, ())),
                false => agent.run(ureq::http::Request::from_parts(parts, &body[..])),
            };
            let (parts, body) = answer?.into_parts();
            let body = body
                .into_with_config()
                .limit(BODY_BYTES_MAX)
                .read_to_vec()?;
            Ok(HttpResponse::from_parts(parts, body.into()))
        });
        let unknown = |error| HttpError::new(HttpErrorKind::Unknown, error);
        asked.await.map_err(unknown)?.map_err(failed)
    }
}

/// Says whether a request may be tried again.
fn failed(error: ureq::Error) -> HttpError {
    use ureq::{Error as E, Timeout};
    let kind = match &error {
        E::HostNotFound | E::ConnectionFailed | E::Timeout(Timeout::Resolve | Timeout::Connect) => {
            HttpErrorKind::Connect
        }
        E::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => HttpErrorKind::Connect,
        E::Timeout(_) => HttpErrorKind::Timeout,
        E::Io(_) | E::Protocol(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    let source: Box<dyn Error + Send + Sync> = match error {
        E::Io(error) => Box::new(error),
        other => Box::new(other),
    };
    HttpError::new_boxed(kind, source)
}
