//! Reads an epoch of an image folder as a training does, ahead of use on some threads: decoded, cropped, flipped, normalised. Nothing is learnt from it.
//!
//! `benches/images.py` runs it beside PyTorch's `DataLoader`. By hand: `cargo bench -p paceline-train --bench images -- FOLDER SIDE BATCH WORKERS`.
//! It prints a JSON object: samples per second from the second batch on, and the peak memory of the process in MiB.

use std::env;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use paceline_ddp::loader::{Loader, LoaderOptions};
use paceline_ddp::sampler::permutation;
use paceline_train::config::RandomCrop;
use paceline_train::data::images::{self, Inspection, Preparation};
use paceline_train::model::Net;
use paceline_train::{Part, Supervised, TrainTask};
use paceline_usage::memory::peak_resident_bytes;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds `--bench`.
    let given: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [folder, side, batch, workers] = &given[..] else {
        return Err("usage: FOLDER SIDE BATCH WORKERS".into());
    };
    let preparation = Preparation {
        side: side.parse()?,
        mean: [0.485, 0.456, 0.406],
        deviation: [0.229, 0.224, 0.225],
        crop: RandomCrop::Resized,
        hflip: 0.5,
        seed: 0,
    };
    let dataset = images::load(Path::new(folder), preparation, (0.0, 0), Inspection::None)?;
    let task = Supervised::<Net>::on(dataset);
    let order = permutation(task.len(Part::Train), 0);
    let jobs: Vec<Vec<usize>> = order
        .chunks(batch.parse()?)
        .map(<[usize]>::to_vec)
        .collect();
    let options = LoaderOptions {
        workers: workers.parse()?,
        ..LoaderOptions::default()
    };
    let mut loader = Loader::new(options, jobs.into_iter(), move |job: &Vec<usize>| {
        task.batch(Part::Train, Some(0), job.iter().copied())
    })?;
    loader.next().ok_or("an empty folder")??;
    let (start, mut samples) = (Instant::now(), 0);
    for loaded in loader {
        samples += loaded?.0.len();
    }
    let speed = samples as f64 / start.elapsed().as_secs_f64();
    let peak = peak_resident_bytes().ok_or("the system does not tell the peak memory")?;
    let peak_mib = peak as f64 / f64::from(1 << 20);
    println!(
        "{}",
        serde_json::json!({ "samples_per_second": speed, "peak_mib": peak_mib })
    );
    Ok(())
}
