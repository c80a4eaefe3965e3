//! Shared objects opened at run time, and the functions found in them.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::Path;

use crate::error::NcclError;
use crate::places::{Candidate, Places};

/// A shared object that is never unloaded: NVIDIA's libraries have threads of their own, and several of ours call into them.
#[derive(Debug)]
pub(crate) struct Library {
    library: &'static libloading::Library,
    path: String,
}

impl Library {
    /// Opens the first candidate that loads and that `take` accepts, so that an old system library does not hide a newer one.
    ///
    /// *Errors*: all places with their reasons; `take`'s own error if there is only one candidate.
    pub(crate) fn open<T>(
        name: &'static str,
        candidates: &[Candidate],
        take: &dyn Fn(Self) -> Result<T, NcclError>,
    ) -> Result<T, NcclError> {
        if cfg!(target_feature = "crt-static") {
            return Err(NcclError::Static { library: name });
        }
        let mut looked = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            let (place, loaded) = match candidate {
                Candidate::Loader(file) => (
                    format!("{file} as the loader finds it"),
                    Self::load(Path::new(file)),
                ),
                Candidate::File(path) if path.is_file() => {
                    (path.display().to_string(), Self::load(path))
                }
                Candidate::File(path) => (path.display().to_string(), Err("no such file".into())),
            };
            let reason = match loaded.map(take) {
                Ok(Ok(taken)) => return Ok(taken),
                Ok(Err(error)) if candidates.len() == 1 => return Err(error),
                Ok(Err(error)) => unfit(error),
                Err(reason) => reason,
            };
            looked.push(format!("{place} ({reason})"));
        }
        Err(NcclError::Library {
            library: name,
            looked: looked.join(", "),
        })
    }

    fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: the file has the name of an NVIDIA library or was given by the user; its initializers are trusted.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| short(&error))?;
        Ok(Self {
            library: Box::leak(Box::new(library)),
            path: path.display().to_string(),
        })
    }

    /// Its path, or the name given to the loader.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// A function by its name.
    ///
    /// # Safety
    ///
    /// `F` is a pointer to a function of exactly the type that the library has under this name.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, NcclError> {
        // SAFETY: the caller's contract, passed on.
        unsafe { self.optional(name) }.ok_or_else(|| NcclError::Function {
            path: self.path.clone(),
            function: name,
        })
    }

    /// A function that not every version has.
    ///
    /// # Safety
    ///
    /// As [`function`](Self::function).
    pub(crate) unsafe fn optional<F: Copy>(&self, name: &'static str) -> Option<F> {
        // SAFETY: the caller's contract, passed on; the library is never closed, so the copy stays valid.
        unsafe { self.library.get::<F>(name.as_bytes()) }
            .ok()
            .map(|symbol| *symbol)
    }
}

/// The reason for skipping a library, without its name, which the caller adds.
fn unfit(error: NcclError) -> String {
    match error {
        NcclError::TooOld { found, least, .. } => {
            format!("version {found}, but {least} or newer is needed")
        }
        NcclError::Function { function, .. } => format!("it has no function {function}"),
        other => other.to_string(),
    }
}

/// The loader's message without the file name, which the caller adds.
fn short(error: &libloading::Error) -> String {
    use std::error::Error;
    let text = match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    match text.split_once(": ") {
        Some((_, reason)) => reason.to_string(),
        None => text,
    }
}

/// The answer of a C function, behind its name.
pub(crate) type Answer = (&'static str, c_int);

/// Declares a table of C functions: its fields, how each is found, and a method that calls each required one.
macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident
        required { $($field:ident: $symbol:literal, ($($name:ident: $argument:ty),*) -> $result:ty;)* }
        optional { $($maybe:ident: $maybe_symbol:literal, ($($maybe_argument:ty),*) -> $maybe_result:ty;)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $table {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
        }

        #[allow(clippy::too_many_arguments, reason = "as in the library's header")]
        impl $table {
            /// Looks up all functions; a missing required one is an error.
            fn find(library: &crate::library::Library) -> Result<Self, crate::error::NcclError> {
                Ok(Self {
                    // SAFETY: the types are those of the library's header.
                    $($field: unsafe { library.function($symbol) }?,)*
                    // SAFETY: the same.
                    $($maybe: unsafe { library.optional($maybe_symbol) },)*
                })
            }

            $(
                /// Calls the function.
                ///
                /// # Safety
                ///
                /// As the library's documentation of the function.
                pub(crate) unsafe fn $field(&self, $($name: $argument),*) -> (&'static str, $result) {
                    // SAFETY: the caller's contract.
                    ($symbol, unsafe { (self.$field)($($name),*) })
                }
            )*
        }
    };
}
pub(crate) use functions;

impl Places {
    /// Opens the first NCCL that `take` accepts.
    pub(crate) fn open_nccl<T>(
        &self,
        take: &dyn Fn(Library) -> Result<T, NcclError>,
    ) -> Result<T, NcclError> {
        Library::open("libnccl.so.2", &self.nccl_candidates(), take)
    }

    /// Opens the driver.
    pub(crate) fn open_cuda(&self) -> Result<Library, NcclError> {
        Library::open("libcuda.so.1", &self.cuda_candidates(), &Ok)
    }
}
