//! Time and bus bandwidth over size, as a picture.

use std::path::Path;

use plotters::prelude::*;

use super::report::{Report, Row, Series};
use super::time::Time;
use crate::error::BoxError;

const SIZE: (u32, u32) = (1200, 560);
/// Colours that colour-blind readers can tell apart, too (Okabe and Ito, 2008).
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// Writes an SVG of two charts, time and bus bandwidth. Each has a line for each algorithm and link.
pub(crate) fn write(report: &Report, path: &Path) -> Result<(), BoxError> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!(
        "{}, {} {}, {} ranks{}",
        report.collective,
        report.dtype,
        report.op,
        report.ranks,
        if report.threads { " of one process" } else { "" }
    );
    let area = area.titled(&title, ("sans-serif", 22))?;
    let (left, right) = area.split_horizontally(SIZE.0 / 2);
    chart(&left, report, "time (us)", |time| time.median_us)?;
    chart(&right, report, "busbw (GB/s)", |time| time.busbw)?;
    area.present()?;
    Ok(())
}

/// The time of the collective in place, as training loops call it, or out of place where it has no form in place.
fn time(row: &Row) -> &Time {
    row.in_place.as_ref().unwrap_or(&row.out_of_place)
}

fn chart<B: DrawingBackend>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    report: &Report,
    label: &str,
    value: fn(&Time) -> f64,
) -> Result<(), BoxError>
where
    B::ErrorType: 'static,
{
    let points = |series: &Series| -> Vec<(f64, f64)> {
        let point = |row: &Row| (row.size as f64, value(time(row)));
        series.rows.iter().map(point).filter(|(_, y)| *y > 0.0).collect()
    };
    let all: Vec<(f64, f64)> = report.series.iter().flat_map(points).collect();
    if all.is_empty() {
        return Ok(());
    }
    // Each axis has some room around the points. Without it the range of a single point would have no length.
    let range = |of: fn(&(f64, f64)) -> f64| {
        let (least, most) =
            all.iter().map(of).fold((f64::MAX, 0.0_f64), |(least, most), x| (least.min(x), most.max(x)));
        least / 1.5..most * 1.5
    };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(range(|p| p.0).log_scale().base(2.0), range(|p| p.1).log_scale())
        .map_err(|e| e.to_string())?;
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(label)
        .x_label_formatter(&|x| size(*x))
        .y_label_formatter(&|y| number(*y))
        .light_line_style(RGBColor(238, 238, 238))
        .label_style(("sans-serif", 13))
        .draw()
        .map_err(|e| e.to_string())?;
    for (i, series) in report.series.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        let points = points(series);
        let line = LineSeries::new(points.iter().copied(), color.stroke_width(2));
        let name = format!("{}, {}", series.link, series.algo);
        chart
            .draw_series(line)
            .map_err(|e| e.to_string())?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        let dots = points.into_iter().map(|point| Circle::new(point, 3, color.filled()));
        chart.draw_series(dots).map_err(|e| e.to_string())?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()
        .map_err(|e| e.to_string())?;
    Ok(())
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b >= (1u64 << 30) as f64 => format!("{:.0}G", b / (1u64 << 30) as f64),
        b if b >= (1u64 << 20) as f64 => format!("{:.0}M", b / (1u64 << 20) as f64),
        b if b >= 1024.0 => format!("{:.0}K", b / 1024.0),
        b => format!("{b:.0}"),
    }
}

fn number(y: f64) -> String {
    if y >= 1.0 { format!("{y:.0}") } else { format!("{y}") }
}
