//! A progress bar on stderr.

use indicatif::{ProgressBar, ProgressStyle};

pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(what: &'static str, total: usize) -> Self {
        let bar = ProgressBar::new(total as u64).with_message(what);
        let style = ProgressStyle::with_template("{msg:22} {bar:40} {pos}/{len} {elapsed}");
        Self(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    pub fn add(&self, count: usize) {
        self.0.inc(count as u64);
    }

    pub fn finish(self) {
        self.0.finish();
    }
}
