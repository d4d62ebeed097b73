//! The table and the chart of the study.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::Result;
use super::systems::SYSTEMS;

/// Colours that colour-blind readers can tell apart, too: Okabe and Ito, 2008.
const COLORS: [RGBColor; 3] = [RGBColor(213, 94, 0), RGBColor(0, 114, 178), RGBColor(0, 158, 115)];
const SIZE: (u32, u32) = (1200, 460);

/// The times with one number of workers.
pub(crate) struct Row {
    workers: usize,
    is_simulated: bool,
    /// Mean and standard deviation of each system's trials, in seconds.
    times: [(f64, f64); 3],
}

impl Row {
    pub(crate) fn measured(workers: usize, trials: &[Vec<f64>]) -> Row {
        let times = std::array::from_fn(|system| mean_and_deviation(&trials[system]));
        Row { workers, is_simulated: false, times }
    }

    pub(crate) fn simulated(workers: usize, seconds: [f64; 3]) -> Row {
        Row { workers, is_simulated: true, times: seconds.map(|seconds| (seconds, 0.0)) }
    }

    /// How many times as fast as the parameter server.
    fn speed_up(&self, system: usize) -> f64 {
        self.times[0].0 / self.times[system].0
    }

    /// How many times as many examples a second as with one worker.
    fn scalability(&self, rows: &[Row], system: usize) -> Option<f64> {
        let one = rows.iter().find(|row| row.workers == 1 && !row.is_simulated)?;
        Some(self.workers as f64 * one.times[system].0 / self.times[system].0)
    }
}

/// The deviation is a sample's (divided by count - 1); 0 for a single trial.
fn mean_and_deviation(trials: &[f64]) -> (f64, f64) {
    let count = trials.len() as f64;
    let mean = trials.iter().sum::<f64>() / count;
    let squares: f64 = trials.iter().map(|trial| (trial - mean).powi(2)).sum();
    (mean, if trials.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 })
}

/// A table in Markdown.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut text = String::from("\n| workers |");
    SYSTEMS.iter().for_each(|(name, _)| text += &format!(" {name}, s |"));
    SYSTEMS[1..].iter().for_each(|(name, _)| text += &format!(" speed-up, {name} |"));
    text += " buckets / all-reduce |";
    SYSTEMS.iter().for_each(|(name, _)| text += &format!(" n t1 / tn, {name} |"));
    text += "\n|---|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let mut cells =
            vec![format!("{}{}", row.workers, if row.is_simulated { " (simulated)" } else { "" })];
        for (mean, deviation) in row.times {
            let deviation = if row.is_simulated { String::new() } else { format!(" ± {deviation:.3}") };
            cells.push(format!("{mean:.3}{deviation}"));
        }
        cells.extend((1..3).map(|system| format!("{:.2}", row.speed_up(system))));
        cells.push(format!("{:.3}", row.times[2].0 / row.times[1].0));
        let scalability = |system| row.scalability(rows, system).map_or("-".into(), |x| format!("{x:.2}"));
        cells.extend((0..3).map(scalability));
        let _ = writeln!(text, "| {} |", cells.join(" | ")); // writing to a String cannot fail
    }
    text + "\n"
}

/// Runtime, speed-up and scalability over the number of workers. Simulated points are hollow.
pub(crate) fn chart(rows: &[Row], path: &Path) -> Result<()> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let panels = area.split_evenly((1, 3));
    panel(&panels[0], rows, "runtime (s)", |row, system| Some(row.times[system].0))?;
    panel(&panels[1], rows, "speed-up over the parameter server", |row, system| Some(row.speed_up(system)))?;
    panel(&panels[2], rows, "scalability, n t1 / tn", |row, system| row.scalability(rows, system))?;
    area.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    rows: &[Row],
    title: &str,
    value: impl Fn(&Row, usize) -> Option<f64>,
) -> Result<()> {
    let series = |system: usize| -> Vec<(f64, f64, bool)> {
        let point = |row: &Row| Some((row.workers as f64, value(row, system)?, row.is_simulated));
        rows.iter().filter_map(point).collect()
    };
    let top = (0..3).flat_map(series).fold(0.0_f64, |top, (_, y, _)| top.max(y));
    let workers: Range<f64> = 0.9..1.15 * rows.iter().map(|row| row.workers).max().unwrap_or(1) as f64;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(title, ("sans-serif", 17))
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d(workers.log_scale().base(2.0), 0.0..1.1 * top.max(f64::MIN_POSITIVE))?;
    chart
        .configure_mesh()
        .x_desc("workers")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .light_line_style(RGBColor(238, 238, 238))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (system, (name, _)) in SYSTEMS.into_iter().enumerate() {
        let color = COLORS[system];
        let points = series(system);
        // Simulated rows get their own line, as the same number of workers may also have been measured.
        for simulated in [false, true] {
            let some = points.iter().filter(|point| point.2 == simulated);
            let line: Vec<(f64, f64)> = some.map(|(x, y, _)| (*x, *y)).collect();
            let style = if simulated { color.stroke_width(1) } else { color.stroke_width(2) };
            let dot = if simulated { color.stroke_width(1) } else { color.filled() };
            chart.draw_series(line.iter().map(|point| Circle::new(*point, 4, dot)))?;
            let drawn = chart.draw_series(LineSeries::new(line, style))?;
            if !simulated {
                drawn
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
            }
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(())
}
