//! How errors print where `main` returns them.

/// Implements `Debug` for an error type that has a `hint()`: the message, then the hint on a line of its own.
///
/// A `main` that returns `Result<(), Box<dyn Error>>` prints its error through `Debug`, and so does `unwrap`. A derived
/// `Debug` shows the fields of the type there; this one shows what `Display` says, and the advice.
///
/// *Example*:
/// ```
/// # use paceline_rendezvous::debug_with_hint;
/// #[derive(thiserror::Error)]
/// #[error("port {port} is in use")]
/// struct PortError { port: u16 }
///
/// impl PortError {
///     fn hint(&self) -> Option<String> {
///         Some("choose another port".into())
///     }
/// }
///
/// debug_with_hint!(PortError);
/// assert_eq!(format!("{:?}", PortError { port: 80 }), "port 80 is in use\nhint: choose another port");
/// ```
#[macro_export]
macro_rules! debug_with_hint {
    ($error:ident $(<$cause:ident: $bound:path>)?) => {
        impl $(<$cause: $bound>)? ::std::fmt::Debug for $error $(<$cause>)? {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)?;
                self.hint().map_or(Ok(()), |hint| ::std::write!(f, "\nhint: {hint}"))
            }
        }
    };
}
