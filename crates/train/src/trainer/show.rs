//! What a training prints at its start, and the pictures of one step.

use std::time::Instant;

use paceline_ddp::device;
use paceline_ddp::timeline::Timeline;

use super::Trainer;
use crate::config::Strategy;
use crate::error::TrainError;
use crate::observe::all_gather;
use crate::report::Header;
use crate::stages;
use crate::task::TrainTask;

impl<T: TrainTask> Trainer<'_, T> {
    /// One step of all ranks as a file that Perfetto opens.
    pub(super) fn write_trace(
        &mut self,
        timeline: &Timeline,
        optimizing: Instant,
    ) -> Result<(), TrainError> {
        let origin = self.observer.origin();
        let mut events = timeline.trace_events(self.group.rank(), origin);
        let since = |at: Instant| at.saturating_duration_since(origin).as_nanos() as f64 / 1e3;
        events.push(serde_json::json!({
            "name": "optimizer", "ph": "X", "pid": self.group.rank(), "tid": 0,
            "ts": since(optimizing), "dur": since(Instant::now()) - since(optimizing),
        }));
        let mine = serde_json::to_vec(&events).expect("events always encode");
        let all = all_gather(&mut self.ddp, &self.group, &mine)?;
        self.follow()?;
        self.draw_pipeline(origin)?;
        if self.group.rank() != 0 {
            return Ok(());
        }
        let events: Vec<serde_json::Value> = all
            .iter()
            .flat_map(|bytes| {
                serde_json::from_slice::<Vec<serde_json::Value>>(bytes).unwrap_or_default()
            })
            .collect();
        let path = self.config.run_dir.join("trace.json");
        let text = serde_json::json!({ "traceEvents": events }).to_string();
        std::fs::write(&path, text).map_err(TrainError::file("write trace", &path))?;
        self.console.print(&format!(
            "trace of step {} in {}: open it at ui.perfetto.dev",
            self.step,
            path.display()
        ));
        Ok(())
    }

    /// Draws the step of a pipeline beside its trace.
    fn draw_pipeline(&self, origin: Instant) -> Result<(), TrainError> {
        let (Some(stages), Some(mesh)) = (self.stages.as_deref(), self.layout.describe()) else {
            return Ok(());
        };
        let subtitle = format!("step {} of {mesh}", self.step);
        let Some(svg) = stages::picture(stages, &self.group, origin, subtitle)? else {
            return Ok(());
        };
        let path = self.config.run_dir.join("pipeline.svg");
        std::fs::write(&path, svg).map_err(|source| TrainError::File {
            action: "write picture",
            path,
            source,
        })
    }

    fn device_text(&self) -> String {
        let text = match device::name(&self.device) {
            Some(name) => format!("{} ({name})", self.config.device),
            None => "CPU".to_string(),
        };
        match self.config.strategy {
            Strategy::Dp => format!("{text}, {} replicas", self.config.devices),
            Strategy::Model => format!("{text}, layers on {} devices", self.config.devices),
            Strategy::Ddp | Strategy::Single => text,
        }
    }

    /// Of the whole model.
    fn parameter_count(&self) -> usize {
        match (&self.net, self.ddp.is_split()) {
            (Some(net), true) => {
                let tensors = self.ddp.tensors(net).into_iter();
                tensors
                    .map(|(_, shape, _)| shape.iter().product::<usize>())
                    .sum()
            }
            _ => self.ddp.parameter_count(),
        }
    }

    pub(super) fn header(&self, resumed: Option<(u64, String)>) -> Header {
        let layout = self.batches.layout();
        let samples_of = |rank: usize| -> usize {
            let each = |shard| {
                layout.global_batch / layout.shards
                    + usize::from(shard < layout.global_batch % layout.shards)
            };
            self.ddp.tree().range(rank).map(each).sum()
        };
        let replicas = 0..self.layout.replicas().world();
        let per_rank: Vec<usize> = replicas.map(samples_of).collect();
        Header {
            data: self.task.description(),
            world: self.group.world(),
            mesh: self.layout.describe(),
            device: self.device_text(),
            threads: rayon::current_num_threads(),
            transport: self.group.transport().to_string(),
            model: self.task.model_name(self.config),
            parameters: self.parameter_count(),
            freezes: self.config.freeze.is_some(),
            precision: self.config.precision,
            global_batch: self.config.global_batch,
            per_rank: (
                per_rank.iter().copied().min().unwrap_or(0),
                per_rank.iter().copied().max().unwrap_or(0),
            ),
            shards: self.config.shards,
            accumulate: self.config.accumulate,
            epochs: self.config.epochs,
            steps: self.schedule.total_steps,
            run_dir: self.config.run_dir.display().to_string(),
            resumed,
        }
    }
}
