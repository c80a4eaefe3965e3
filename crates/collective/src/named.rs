//! Enums whose variants have a number on the wire and a name in settings and messages.

/// Declares such an enum, with the list of its variants.
macro_rules! named {
    (
        $(#[$about:meta])*
        pub enum $name:ident: $count:literal {
            $($(#[$doc:meta])* $variant:ident = $code:literal, $text:literal;)*
        }
    ) => {
        $(#[$about])*
        pub enum $name {
            $($(#[$doc])* $variant = $code,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [Self; $count] = [$(Self::$variant),*];

            /// As settings, tables and messages call it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            pub(crate) fn code(self) -> u8 {
                self as u8
            }

            pub(crate) fn from_code(code: u8) -> Option<Self> {
                Self::ALL.into_iter().find(|one| one.code() == code)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(crate) use named;
