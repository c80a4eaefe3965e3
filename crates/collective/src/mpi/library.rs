//! An MPI library, found and loaded at run time, and what differs between the binary interfaces of such libraries.
//!
//! | interface | libraries | handles | constants |
//! |---|---|---|---|
//! | Open MPI's | Open MPI 4 and 5 | pointers | addresses of the library's own objects |
//! | MPICH's | MPICH 3.1 and later, Intel MPI, MVAPICH, Cray MPICH | numbers | numbers |
//! | the standard's | `libmpi_abi` of MPI 5 | pointers | small numbers |
//!
//! *Source*: the headers of Open MPI 4.1.4 and 5.0.11 and of MPICH 4.0.2 and 5.0.2; MPI 5.0, chapter 20.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;

use libloading::os::unix::{Library as File, RTLD_GLOBAL, RTLD_NOW};
use paceline_rendezvous::scheduler::Scheduler;

use super::messages::{Address, Messages, Request};

/// The variable that names the library's file, in place of a search.
const VARIABLE: &str = "PACELINE_MPI_LIBRARY";
const OPEN_MPI: [&str; 1] = ["libmpi.so.40"];
/// The second is Debian's name, the others are those of the standard's interface.
const OTHERS: [&str; 4] = [
    "libmpi.so.12",
    "libmpich.so.12",
    "libmpi_abi.so.1",
    "libmpi_abi.so.0",
];
/// Part of the file's name of a library with the standard's interface. MPICH 5 has two files, and the same functions in both.
const STANDARD: &str = "mpi_abi";
/// What versions of libraries with MPICH's interface contain.
const LIKE_MPICH: [&str; 3] = ["MPICH", "Intel(R) MPI", "MVAPICH"];
/// The longest text that any library returns.
const TEXT_BYTES_MAX: usize = 8192;

/// A library that has been loaded, and is never unloaded.
#[derive(Debug)]
pub(crate) struct Library {
    /// Its own words, the first line of them.
    pub(crate) version: String,
    pub(super) calls: Box<dyn Calls>,
}

/// What is asked of a library beside messages. Everything here is called from one thread.
pub(super) trait Calls: Messages {
    fn is_initialized(&self) -> bool;

    /// Initializes MPI; this process's number, and the number of processes.
    ///
    /// *Blocks*: until all processes have come to it.
    fn init(&self) -> Result<(c_int, c_int), String>;

    /// Begins to make the communicator that messages go by: one that nothing else of the program uses.
    fn duplicate(&self) -> Result<Request, String>;

    /// Begins to meet all processes.
    fn meet(&self) -> Result<Request, String>;

    /// *Blocks*: until all processes have come to it.
    fn finalize(&self) -> Result<(), String>;
}

impl Library {
    /// Loads the library that the environment names, or else the one that fits the launcher.
    ///
    /// *Errors*: where it was looked for, and what was found there.
    pub(super) fn load() -> Result<Self, String> {
        if cfg!(target_feature = "crt-static") {
            return Err(
                "a program that is linked statically, as this one is, cannot load MPI".into(),
            );
        }
        if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            let path = path.to_string_lossy();
            return Self::open(&path)
                .map_err(|reason| format!("{path}, which {VARIABLE} names: {reason}"));
        }
        let mut names: Vec<&str> = OPEN_MPI.into_iter().chain(OTHERS).collect();
        if let Some((Scheduler::Mpich, _)) = super::launcher() {
            names.rotate_left(OPEN_MPI.len());
        }
        let mut reasons = Vec::with_capacity(names.len());
        for name in names {
            match Self::open(name) {
                Ok(library) => return Ok(library),
                Err(reason) => reasons.push(format!("{name} ({reason})")),
            }
        }
        Err(format!(
            "no MPI library was found: looked for {}",
            reasons.join(", ")
        ))
    }

    pub(super) fn open(name: &str) -> Result<Self, String> {
        // Open MPI 4 loads plugins that look for its symbols among those of the whole process.
        // SAFETY: the file has the name of an MPI library or was given by the user; its initializers are trusted.
        let file = unsafe { File::open(Some(name), RTLD_NOW | RTLD_GLOBAL) };
        let file: &'static File = Box::leak(Box::new(file.map_err(|error| short(&error, name))?));
        let version = version(file)?;
        let address = |symbol: &CStr| -> Option<*mut c_void> {
            // SAFETY: only the address is taken.
            unsafe { file.get::<*mut c_void>(symbol.to_bytes_with_nul()) }
                .ok()
                .map(|symbol| symbol.as_raw_ptr())
        };
        let constant = |value: usize| std::ptr::without_provenance_mut::<c_void>(value);
        let open_mpi = [
            c"ompi_mpi_comm_world",
            c"ompi_mpi_byte",
            c"ompi_mpi_errors_return",
        ]
        .map(address);
        let calls: Box<dyn Calls> = if let [Some(world), Some(byte), Some(errors_return)] = open_mpi
        {
            Box::new(Interface::find(file, [world, byte, errors_return], 2)?)
        } else if name.contains(STANDARD) {
            let constants = [0x101, 0x247, 0x143].map(constant);
            Box::new(Interface::find(file, constants, 2048)?)
        } else if LIKE_MPICH.iter().any(|known| version.contains(known)) {
            let constants: [c_int; 3] = [0x4400_0000, 0x4c00_010d, 0x5400_0001];
            Box::new(Interface::find(file, constants, 2)?)
        } else {
            return Err(format!(
                "its binary interface is not known; it calls itself {version:?}"
            ));
        };
        Ok(Self { version, calls })
    }
}

/// A function's type is that of the library's header, with `H` for handles.
type Plain = unsafe extern "C" fn() -> c_int;
type OfFlag = unsafe extern "C" fn(*mut c_int) -> c_int;
type OfText = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type OfComm<H> = unsafe extern "C" fn(H, *mut c_int) -> c_int;

/// A library's functions, and its constants. `H` is the type of its handles.
struct Interface<H: 'static> {
    init_thread:
        unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    initialized: OfFlag,
    finalize: Plain,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    comm_rank: OfComm<H>,
    comm_size: OfComm<H>,
    comm_set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    comm_idup: unsafe extern "C" fn(H, *mut H, *mut H) -> c_int,
    ibarrier: unsafe extern "C" fn(H, *mut H) -> c_int,
    isend: unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    test: unsafe extern "C" fn(*mut H, *mut c_int, *mut Status) -> c_int,
    cancel: unsafe extern "C" fn(*mut H) -> c_int,
    get_count: unsafe extern "C" fn(*const Status, H, *mut c_int) -> c_int,
    world: H,
    byte: H,
    errors_return: H,
    /// `MPI_THREAD_SERIALIZED`.
    serialized: c_int,
    /// Where the communicator for messages is, once it is made.
    comm: *mut H,
}

// SAFETY: the pointers are the library's, and `comm` is written by the library before the first message and read afterwards.
unsafe impl<H> Send for Interface<H> {}
// SAFETY: the same; the library's functions may be called from any thread, one at a time.
unsafe impl<H> Sync for Interface<H> {}

/// `MPI_Status` of any library, which only `MPI_Get_count` looks into. The largest known one has 32 bytes.
#[repr(C, align(16))]
struct Status([u8; 128]);

/// A handle, and the word that it is kept in.
trait Handle: Copy + 'static {
    fn of(word: usize) -> Self;
    fn word(self) -> usize;
}

impl Handle for *mut c_void {
    fn of(word: usize) -> Self {
        std::ptr::with_exposed_provenance_mut(word)
    }

    fn word(self) -> usize {
        self.expose_provenance()
    }
}

impl Handle for c_int {
    fn of(word: usize) -> Self {
        word as Self
    }

    fn word(self) -> usize {
        self as usize
    }
}

impl<H: Handle> Interface<H> {
    fn find(
        file: &'static File,
        [world, byte, errors_return]: [H; 3],
        serialized: c_int,
    ) -> Result<Self, String> {
        // SAFETY: the types are those of the library's header.
        unsafe {
            Ok(Self {
                init_thread: function(file, c"MPI_Init_thread")?,
                initialized: function(file, c"MPI_Initialized")?,
                finalize: function(file, c"MPI_Finalize")?,
                error_string: function(file, c"MPI_Error_string")?,
                comm_rank: function(file, c"MPI_Comm_rank")?,
                comm_size: function(file, c"MPI_Comm_size")?,
                comm_set_errhandler: function(file, c"MPI_Comm_set_errhandler")?,
                comm_idup: function(file, c"MPI_Comm_idup")?,
                ibarrier: function(file, c"MPI_Ibarrier")?,
                isend: function(file, c"MPI_Isend")?,
                irecv: function(file, c"MPI_Irecv")?,
                test: function(file, c"MPI_Test")?,
                cancel: function(file, c"MPI_Cancel")?,
                get_count: function(file, c"MPI_Get_count")?,
                world,
                byte,
                errors_return,
                serialized,
                comm: Box::leak(Box::new(world)),
            })
        }
    }

    fn checked(&self, name: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let text = text(|text, len| {
            // SAFETY: there is room for the longest text.
            unsafe { (self.error_string)(code, text, len) }
        });
        // MPICH adds a line for each function that the error has come through; the last one says most.
        Err(format!(
            "{name}: {}",
            text.lines().last().unwrap_or_default()
        ))
    }

    /// A request that a function of the library begins.
    fn begun(&self, name: &str, begin: impl FnOnce(*mut H) -> c_int) -> Result<Request, String> {
        let mut request = H::of(0);
        self.checked(name, begin(&raw mut request))?;
        Ok(Request(request.word()))
    }

    /// The communicator for messages.
    fn comm(&self) -> H {
        // SAFETY: it is never freed, and written only before the first message.
        unsafe { self.comm.read() }
    }
}

impl<H: Handle> Calls for Interface<H> {
    fn is_initialized(&self) -> bool {
        let mut flag = 0;
        // SAFETY: it may be called at any time, and sets the flag.
        unsafe { (self.initialized)(&raw mut flag) };
        flag != 0
    }

    fn init(&self) -> Result<(c_int, c_int), String> {
        let mut provided = 0;
        let nothing = std::ptr::null_mut();
        // SAFETY: MPI has not been initialized; it needs no arguments of the program.
        let code = unsafe {
            (self.init_thread)(nothing, nothing.cast(), self.serialized, &raw mut provided)
        };
        self.checked("MPI_Init_thread", code)?;
        if provided < self.serialized {
            return Err("the library was built without MPI_THREAD_SERIALIZED".into());
        }
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized, and the handles are its own.
        let (handled, ranked, sized) = unsafe {
            (
                (self.comm_set_errhandler)(self.world, self.errors_return),
                (self.comm_rank)(self.world, &raw mut rank),
                (self.comm_size)(self.world, &raw mut size),
            )
        };
        self.checked("MPI_Comm_set_errhandler", handled)?;
        self.checked("MPI_Comm_rank", ranked)?;
        self.checked("MPI_Comm_size", sized)?;
        Ok((rank, size))
    }

    fn duplicate(&self) -> Result<Request, String> {
        // SAFETY: the communicator's place is never freed. It inherits the world's error handler.
        self.begun("MPI_Comm_idup", |request| unsafe {
            (self.comm_idup)(self.world, self.comm, request)
        })
    }

    fn meet(&self) -> Result<Request, String> {
        // SAFETY: the communicator has been made.
        self.begun("MPI_Ibarrier", |request| unsafe {
            (self.ibarrier)(self.comm(), request)
        })
    }

    fn finalize(&self) -> Result<(), String> {
        // SAFETY: the caller has ended what it began.
        let code = unsafe { (self.finalize)() };
        self.checked("MPI_Finalize", code)
    }
}

impl<H: Handle> Messages for Interface<H> {
    unsafe fn send(&self, to: Address, bytes: *const u8, len: usize) -> Result<Request, String> {
        let (len, comm) = (len as c_int, self.comm());
        // SAFETY: the caller's contract.
        self.begun("MPI_Isend", |request| unsafe {
            (self.isend)(
                bytes.cast(),
                len,
                self.byte,
                to.process,
                to.tag,
                comm,
                request,
            )
        })
    }

    unsafe fn receive(&self, from: Address, room: *mut u8, len: usize) -> Result<Request, String> {
        let (len, comm) = (len as c_int, self.comm());
        // SAFETY: the caller's contract.
        self.begun("MPI_Irecv", |request| unsafe {
            (self.irecv)(
                room.cast(),
                len,
                self.byte,
                from.process,
                from.tag,
                comm,
                request,
            )
        })
    }

    fn test(&self, request: &mut Request) -> Result<Option<usize>, String> {
        let mut handle = H::of(request.0);
        let (mut done, mut count) = (0, 0);
        let mut status = Status([0; 128]);
        // SAFETY: the request is the library's own and has not been completed, and a status fits.
        let code = unsafe { (self.test)(&raw mut handle, &raw mut done, &raw mut status) };
        request.0 = handle.word();
        self.checked("MPI_Test", code)?;
        if done == 0 {
            return Ok(None);
        }
        // Of what was sent or cancelled the count means nothing, and is no error.
        // SAFETY: the library has filled the status.
        unsafe { (self.get_count)(&raw const status, self.byte, &raw mut count) };
        Ok(Some(usize::try_from(count).unwrap_or(0)))
    }

    fn end(&self, mut request: Request, receives: bool) -> bool {
        if receives {
            let mut handle = H::of(request.0);
            // What cannot be cancelled stays what it was.
            // SAFETY: the request is the library's own and has not been completed.
            unsafe { (self.cancel)(&raw mut handle) };
        }
        matches!(self.test(&mut request), Ok(Some(_)))
    }
}

impl<H> fmt::Debug for Interface<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interface").finish_non_exhaustive()
    }
}

/// A function by its name.
///
/// # Safety
///
/// `F` is a pointer to a function of exactly the type that the library has under this name.
unsafe fn function<F: Copy>(file: &'static File, name: &'static CStr) -> Result<F, String> {
    // SAFETY: the caller's contract; the library is never closed.
    let found = unsafe { file.get::<F>(name.to_bytes_with_nul()) };
    found
        .map(|function| *function)
        .map_err(|_| format!("it has no function {}", name.to_string_lossy()))
}

/// The first line of what a library says about itself.
fn version(file: &'static File) -> Result<String, String> {
    // SAFETY: the type is that of MPI's standard, in which the function may be called at any time.
    let function: OfText = unsafe { function(file, c"MPI_Get_library_version") }?;
    // SAFETY: there is room for the longest text.
    let text = text(|text, len| unsafe { function(text, len) });
    let words = text.lines().next().unwrap_or_default().split(',').next();
    let words = words.unwrap_or_default().split_whitespace();
    Ok(words.collect::<Vec<_>>().join(" "))
}

fn text(fill: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let mut bytes = [0_u8; TEXT_BYTES_MAX + 1];
    let mut len = 0;
    fill(bytes.as_mut_ptr().cast(), &raw mut len);
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    text.to_string_lossy().trim().to_owned()
}

/// The loader's message without the file's name, which the caller adds.
fn short(error: &libloading::Error, name: &str) -> String {
    use std::error::Error;
    let text = error
        .source()
        .map_or(error.to_string(), ToString::to_string);
    text.trim_start_matches(name)
        .trim_start_matches(": ")
        .to_owned()
}
