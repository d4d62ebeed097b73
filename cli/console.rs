//! Where `demo`, `perf` and `tune` write: lines, and a progress bar on a terminal.

use std::io::{self, IsTerminal, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The output of one process.
///
/// If bars are drawn, lines go to stderr as the bars do, above them: in one stream, lines and bars
/// cannot run into each other. Otherwise lines go to stdout.
#[derive(Debug)]
pub(crate) struct Console {
    bars: MultiProgress,
    silent: bool,
}

impl Console {
    /// A console that writes nothing unless it is `speaking`. It draws bars if the user watches both
    /// streams on a terminal.
    pub(crate) fn new(speaking: bool) -> Self {
        let watched = io::stdout().is_terminal() && io::stderr().is_terminal();
        let target =
            if speaking && watched { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bars: MultiProgress::with_draw_target(target), silent: !speaking }
    }

    /// Writes a line.
    pub(crate) fn line(&self, text: &str) -> io::Result<()> {
        if self.silent {
            Ok(())
        } else if self.bars.is_hidden() {
            writeln!(io::stdout().lock(), "{text}")
        } else {
            self.bars.println(text)
        }
    }

    /// A progress bar for this many steps; its `finish_and_clear` removes it.
    pub(crate) fn bar(&self, label: &'static str, steps: usize) -> ProgressBar {
        let template = "{msg} [{bar:40}] {pos}/{len} steps, {eta} left";
        let style = ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        let bar = ProgressBar::new(steps as u64).with_style(style).with_message(label);
        self.bars.add(bar)
    }
}
