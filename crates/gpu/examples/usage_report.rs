//! Reports on recorded samples: `cargo run -p paceline-gpu --example usage_report -- RECORDING [en|ko] [PICTURE]`.

use std::error::Error;
use std::path::Path;

use paceline_gpu::track::{Lang, Replay, Rules};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let recording = arguments
        .first()
        .ok_or("a recording is needed: its CSV or JSON lines")?;
    let lang = arguments.get(1).map_or_else(
        || Ok(Lang::from_env(|name| std::env::var(name).ok())),
        |name| Lang::named(name).ok_or("the language is en or ko"),
    )?;
    let report = Replay::open(Path::new(recording))?.report(Rules::default())?;
    print!("{}", report.text(lang));
    if let Some(picture) = arguments.get(2) {
        std::fs::write(picture, report.svg(lang))?;
    }
    Ok(())
}
