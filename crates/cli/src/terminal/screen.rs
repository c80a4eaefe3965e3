//! The terminal: taken over, drawn on, and given back whatever happens.

use std::io::{self, Stdout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, execute};
use ratatui::layout::Rect;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator;

/// How long the picture may take to end after a signal. A terminal that takes no more output would keep it for ever.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Most keys that are taken at once; held keys must not keep the picture from being drawn.
const INPUTS_MAX: usize = 64;

/// Whether there is a terminal to give back.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal, while the picture is on it.
pub(crate) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal. It is given back when this is dropped, and before a panic is reported.
    pub(crate) fn open() -> io::Result<Self> {
        give_back_on_panic();
        IS_TAKEN.store(true, Ordering::SeqCst);
        let open = || {
            enable_raw_mode()?;
            execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
            Terminal::new(CrosstermBackend::new(io::stdout()))
        };
        // Should it be taken by half.
        open()
            .map(|terminal| Self { terminal })
            .inspect_err(|_| give_back())
    }

    pub(crate) fn draw(&mut self, draw: impl FnOnce(Rect, &mut Buffer)) -> io::Result<()> {
        self.terminal
            .draw(|frame| draw(frame.area(), frame.buffer_mut()))?;
        Ok(())
    }

    /// What was pressed, as `key` understands it; nothing in place of a key for what only asks for the picture to be drawn again, as
    /// another size does.
    ///
    /// *Blocks*: for `timeout` at most.
    pub(crate) fn input<K>(
        &mut self,
        timeout: Duration,
        key: impl Fn(&KeyEvent) -> Option<K>,
    ) -> io::Result<Vec<Option<K>>> {
        let mut inputs = Vec::new();
        let mut wait = timeout;
        while inputs.len() < INPUTS_MAX && event::poll(wait)? {
            match event::read()? {
                Event::Key(pressed) if pressed.kind != KeyEventKind::Release => {
                    inputs.extend(key(&pressed).map(Some));
                }
                Event::Resize(..) => inputs.push(None),
                _ => {}
            }
            wait = Duration::ZERO;
        }
        Ok(inputs)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back, once.
fn give_back() {
    if IS_TAKEN.swap(false, Ordering::SeqCst) {
        // Nothing can be done about a terminal that is gone. Keys first: that needs no room in its output.
        let _ = disable_raw_mode();
        let _ = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
    }
}

fn give_back_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            report(panic);
        }));
    });
}

/// The signals that end the picture.
pub(crate) struct Signals {
    received: Arc<AtomicUsize>,
    handle: iterator::Handle,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    /// Begins to heed them. Should the picture not end in time after one, because its terminal takes nothing any more, the
    /// program ends without it.
    pub(crate) fn heed() -> io::Result<Self> {
        let mut signals = iterator::Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT])?;
        let handle = signals.handle();
        let received = Arc::new(AtomicUsize::new(0));
        let told = received.clone();
        let heed = move || {
            // Ends without a signal once no handler is left.
            let Some(signal) = signals.forever().next() else {
                return;
            };
            told.store(usize::try_from(signal).unwrap_or(0), Ordering::SeqCst);
            let until = std::time::Instant::now() + END_TIMEOUT;
            while !signals.is_closed() {
                if std::time::Instant::now() >= until {
                    let _ = disable_raw_mode();
                    std::process::exit(128 + signal);
                }
                thread::park_timeout(Duration::from_millis(50));
            }
        };
        let thread = thread::Builder::new()
            .name("signals".to_owned())
            .spawn(heed)?;
        Ok(Self {
            received,
            handle,
            thread: Some(thread),
        })
    }

    /// The signal that came.
    pub(crate) fn received(&self) -> Option<u8> {
        let signal = self.received.load(Ordering::SeqCst);
        u8::try_from(signal).ok().filter(|signal| *signal > 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
