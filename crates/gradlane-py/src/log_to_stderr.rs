//! The core's warnings on standard error. They come from threads without the GIL, at any time, so they do
//! not go through Python's `logging`.

use log::{Level, LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("gradlane: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// Makes standard error the destination of this module's logs.
pub(crate) fn install() {
    // The logger of another import of this module does the same.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
