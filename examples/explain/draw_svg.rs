//! The plan as an SVG: a row a place, a block a task, one panel for each split on a shared time axis.

use std::path::Path;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::timeline::{Panel, Timeline};

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 420;
const TITLE_HEIGHT: u32 = 64;
const FONT: &str = "sans-serif";

pub fn draw(path: &Path, title: &str, panels: &[Panel]) -> Result<()> {
    let height = TITLE_HEIGHT + PANEL_HEIGHT * panels.len() as u32;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(TITLE_HEIGHT);
    for (line, text) in title.lines().enumerate() {
        head.draw(&Text::new(text.to_string(), (16, 12 + 24 * line as i32), (FONT, 18).into_font()))?;
    }
    let longest = panels.iter().map(|panel| panel.timeline.makespan()).max().unwrap_or(0).max(1);
    for (area, panel) in body.split_evenly((panels.len(), 1)).iter().zip(panels) {
        draw_panel(area, panel, longest)?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel, longest: u64) -> Result<()> {
    let timeline = &panel.timeline;
    let places = timeline.places.len().max(1);
    let right = longest as f64 * 1.02;
    let ends = format!("ends after {} (thick line), {:.1} if shared out evenly (thin line)", timeline.makespan(), timeline.even());
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}; {ends}", panel.title), (FONT, 16))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..right, (places as f64)..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc("time, KV tiles")
        .y_desc(format!("places: {}", timeline.place))
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .label_style((FONT, 14))
        .draw()?;
    chart.draw_series(blocks(timeline, longest))?;
    for (at, width) in [(timeline.makespan() as f64, 2), (timeline.even(), 1)] {
        chart.draw_series(LineSeries::new(vec![(at, 0.0), (at, places as f64)], BLACK.stroke_width(width)))?;
    }
    Ok(())
}

/// Whole numbers only: ticks between them go unlabelled.
fn whole(value: &f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { String::new() }
}

/// A block for each task, coloured by sequence, with a gap after it, and between rows while there is room for one.
fn blocks(timeline: &Timeline, longest: u64) -> impl Iterator<Item = Rectangle<(f64, f64)>> + '_ {
    let row_gap = if timeline.places.len() <= 120 { 0.08 } else { 0.0 };
    let time_gap = longest as f64 * 0.0015;
    timeline.places.iter().enumerate().flat_map(move |(place, stays)| {
        stays.iter().map(move |stay| {
            let length = (stay.end - stay.start) as f64;
            let end = stay.start as f64 + (length - time_gap).max(length * 0.5);
            let corners = [(stay.start as f64, place as f64 + row_gap), (end, (place + 1) as f64 - row_gap)];
            Rectangle::new(corners, colour(stay.sequence).filled())
        })
    })
}

/// Neighbouring sequences get hues far apart (a golden-ratio walk), at two lightnesses.
fn colour(sequence: usize) -> HSLColor {
    let hue = (sequence as f64 * 0.618_033_988_749_895).fract();
    HSLColor(hue, 0.55, if sequence.is_multiple_of(2) { 0.5 } else { 0.66 })
}
