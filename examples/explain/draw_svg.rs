//! The plan as an SVG: a row a place, a block a task, one panel for each split on a shared time axis.

use std::cmp::Reverse;
use std::path::Path;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::timeline::{Panel, Stay, Timeline};

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 420;
const TITLE_HEIGHT: u32 = 64;
const FONT: &str = "sans-serif";

/// Sequences that colours tell apart; more share two shades of one.
const COLOURS: usize = 32;
const LEGEND_COLUMNS: usize = 8;
const LEGEND_ROW: u32 = 20;
/// Rows of a panel; of more places every so many is drawn.
const MOST_ROWS: usize = 48;

/// Draws the panels of a plan for sequences of `contexts` tokens.
pub fn draw(path: &Path, title: &str, contexts: &[i32], panels: &[Panel]) -> Result<()> {
    let legend = legend(contexts);
    let legend_height = LEGEND_ROW * legend.len().div_ceil(LEGEND_COLUMNS).max(1) as u32 + 8;
    let height = TITLE_HEIGHT + legend_height + PANEL_HEIGHT * panels.len() as u32;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, rest) = root.split_vertically(TITLE_HEIGHT);
    for (line, text) in title.lines().enumerate() {
        head.draw(&Text::new(text.to_string(), (16, 12 + 24 * line as i32), (FONT, 18).into_font()))?;
    }
    let (key, body) = rest.split_vertically(legend_height);
    draw_legend(&key, &legend)?;
    let longest = panels.iter().map(|panel| panel.timeline.makespan()).max().unwrap_or(0).max(1);
    for (area, panel) in body.split_evenly((panels.len(), 1)).iter().zip(panels) {
        draw_panel(area, panel, longest)?;
    }
    root.present()?;
    Ok(())
}

/// What each colour stands for.
fn legend(contexts: &[i32]) -> Vec<(HSLColor, String)> {
    if contexts.len() > COLOURS {
        let text = format!("{} sequences, more than colours tell apart: the two shades alternate from task to task", contexts.len());
        return vec![(shade(0), text)];
    }
    contexts.iter().enumerate().map(|(sequence, context)| (colour(sequence), format!("{sequence}: {context} tokens"))).collect()
}

fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, legend: &[(HSLColor, String)]) -> Result<()> {
    let column = (WIDTH as usize - 32) / LEGEND_COLUMNS;
    for (index, (colour, text)) in legend.iter().enumerate() {
        let x = 16 + (index % LEGEND_COLUMNS * column) as i32;
        let y = (index / LEGEND_COLUMNS) as i32 * LEGEND_ROW as i32;
        area.draw(&Rectangle::new([(x, y), (x + 12, y + 12)], colour.filled()))?;
        area.draw(&Text::new(text.clone(), (x + 18, y), (FONT, 13).into_font()))?;
    }
    Ok(())
}

/// The places drawn: all, or of many the one that ends last and every so many after it by their ends.
fn rows(timeline: &Timeline) -> Vec<&Vec<Stay>> {
    let mut rows: Vec<&Vec<Stay>> = timeline.places.iter().collect();
    if rows.len() <= MOST_ROWS {
        return rows;
    }
    rows.sort_by_key(|stays| Reverse(stays.last().map_or(0, |stay| stay.end)));
    let every = rows.len().div_ceil(MOST_ROWS);
    rows.into_iter().step_by(every).collect()
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel, longest: u64) -> Result<()> {
    let timeline = &panel.timeline;
    let rows = rows(timeline);
    let (places, drawn) = (timeline.places.len(), rows.len());
    let axis = match places == drawn {
        true => format!("places: {}", timeline.place),
        false => format!("{drawn} of {places} places, last to end first"),
    };
    let bottom = drawn.max(1) as f64;
    let right = longest as f64 * 1.02;
    let ends = format!("ends after {} (thick line), {:.1} if shared out evenly (thin line)", timeline.makespan(), timeline.even());
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}; {ends}", panel.title), (FONT, 16))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..right, bottom..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc("time, KV tiles")
        .y_desc(axis)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .label_style((FONT, 14))
        .draw()?;
    chart.draw_series(blocks(&rows, timeline.sequences, longest))?;
    for (at, width) in [(timeline.makespan() as f64, 2), (timeline.even(), 1)] {
        chart.draw_series(LineSeries::new(vec![(at, 0.0), (at, bottom)], BLACK.stroke_width(width)))?;
    }
    Ok(())
}

/// Whole numbers only: ticks between them go unlabelled.
fn whole(value: &f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { String::new() }
}

/// A block for each task, coloured by sequence as far as colours go, with a gap after it and between rows.
fn blocks<'a>(rows: &'a [&Vec<Stay>], sequences: usize, longest: u64) -> impl Iterator<Item = Rectangle<(f64, f64)>> + 'a {
    const ROW_GAP: f64 = 0.08;
    let time_gap = longest as f64 * 0.0015;
    rows.iter().enumerate().flat_map(move |(row, stays)| {
        stays.iter().enumerate().map(move |(task, stay)| {
            let length = (stay.end - stay.start) as f64;
            let end = stay.start as f64 + (length - time_gap).max(length * 0.5);
            let corners = [(stay.start as f64, row as f64 + ROW_GAP), (end, (row + 1) as f64 - ROW_GAP)];
            let colour = if sequences > COLOURS { shade(task) } else { colour(stay.sequence) };
            Rectangle::new(corners, colour.filled())
        })
    })
}

/// One hue at two lightnesses, by turns.
fn shade(task: usize) -> HSLColor {
    HSLColor(0.58, 0.55, if task.is_multiple_of(2) { 0.45 } else { 0.7 })
}

/// Neighbouring sequences get hues far apart (a golden-ratio walk), at two lightnesses.
fn colour(sequence: usize) -> HSLColor {
    let hue = (sequence as f64 * 0.618_033_988_749_895).fract();
    HSLColor(hue, 0.55, if sequence.is_multiple_of(2) { 0.5 } else { 0.66 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sequences_and_places_stay_legible() {
        assert_eq!(legend(&[5; COLOURS]).len(), COLOURS);
        assert_eq!(legend(&[5; COLOURS + 1]).len(), 1);
        let places = (1..=1000).map(|end| vec![Stay { sequence: 0, start: 0, end }]).collect();
        let timeline = Timeline { places, place: String::new(), sequences: 40 };
        let rows = rows(&timeline);
        assert!(rows.len() <= MOST_ROWS && rows[0][0].end == 1000 && rows.last().unwrap()[0].end < 40);
        assert_eq!(blocks(&rows, timeline.sequences, 1000).count(), rows.len());
    }
}
