//! A rank's two streams.

/// One of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    Out,
    Err,
}

impl Stream {
    pub(crate) const BOTH: [Self; 2] = [Self::Out, Self::Err];

    /// Its name for people and in files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Out => "stdout",
            Self::Err => "stderr",
        }
    }
}
