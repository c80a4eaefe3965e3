//! An event processor for ranks without output.

use burn::train::renderer::MetricsRenderer;
use burn::train::{
    AsyncProcessorTraining, EventProcessorError, EventProcessorTraining, LearnerEvent,
    LearnerModel, TrainingComponents,
};

/// Drops every event, and keeps the renderer for the end of the training.
struct Silent {
    renderer: Box<dyn MetricsRenderer>,
}

impl<T, V> EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>> for Silent {
    fn process_train(&mut self, _event: LearnerEvent<T>) -> Result<(), EventProcessorError> {
        Ok(())
    }

    fn process_valid(&mut self, _event: LearnerEvent<V>) -> Result<(), EventProcessorError> {
        Ok(())
    }

    fn renderer(self) -> Box<dyn MetricsRenderer> {
        self.renderer
    }
}

/// `components` without metrics, rendering and summary.
pub(super) fn silence<M: LearnerModel>(
    mut components: TrainingComponents<M>,
) -> TrainingComponents<M> {
    let renderer = components.event_processor.renderer();
    components.event_processor = AsyncProcessorTraining::new(Silent { renderer });
    components.summary = None;
    components
}
