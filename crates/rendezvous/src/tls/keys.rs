//! The key that a process shows, and how both ends of TLS are set up.

use std::io;
use std::sync::{Arc, OnceLock};

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms,
    ring as provider, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer,
    UnixTime,
};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme, SupportedCipherSuite,
};
use webpki::ring::ED25519;

/// The only kind of key.
static ALGORITHMS: WebPkiSupportedAlgorithms = WebPkiSupportedAlgorithms {
    all: &[ED25519],
    mapping: &[(SignatureScheme::ED25519, &[ED25519])],
};

/// The configuration of both sides' connections.
pub(super) struct Keys {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl Keys {
    /// This process's, made when first asked for.
    pub(super) fn of_process() -> io::Result<&'static Self> {
        static KEYS: OnceLock<Result<Keys, String>> = OnceLock::new();
        // One suite, because both ends are this program: the fastest where the processor has AES.
        let suite = provider::cipher_suite::TLS13_AES_128_GCM_SHA256;
        let keys = KEYS.get_or_init(|| Self::new(suite).map_err(|error| error.to_string()));
        keys.as_ref()
            .map_err(|reason| io::Error::other(reason.clone()))
    }

    pub(super) fn new(suite: SupportedCipherSuite) -> io::Result<Self> {
        let provider = Arc::new(CryptoProvider {
            cipher_suites: vec![suite],
            kx_groups: vec![provider::kx_group::X25519],
            signature_verification_algorithms: ALGORITHMS,
            secure_random: &System,
            key_provider: &System,
        });
        let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
            .map_err(|_| io::Error::other("the system gave no randomness for a key"))?;
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pair.as_ref()))
            .map_err(io::Error::other)?;
        let shown = key
            .public_key()
            .ok_or_else(|| io::Error::other("the key has no public half"))?;
        let shown = CertificateDer::from(shown.as_ref().to_vec());
        let certified = Arc::new(CertifiedKey::new(vec![shown], key));

        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;

        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey))
            .with_no_client_auth();
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }
}

/// A client has to name whom it dials; it is neither sent nor checked.
pub(super) fn name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

/// The rest of what TLS asks a provider for. The provider that comes with rustls would bring RSA and other curves into each program: half a
/// megabyte that nothing uses.
#[derive(Debug)]
struct System;

impl SecureRandom for System {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        getrandom::fill(bytes).map_err(|_| GetRandomFailed)
    }
}

impl KeyProvider for System {
    fn load_private_key(&self, _: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
        Err(Error::General("keys are made here, not loaded".into()))
    }
}

/// Takes any key that the peer holds: whose it is, the token proves.
#[derive(Debug)]
struct AnyKey;

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &ALGORITHMS)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
