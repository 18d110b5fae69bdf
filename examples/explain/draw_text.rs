//! The plan as bars in the terminal.

use crate::count;
use crate::timeline::{Panel, Stay, Timeline};

/// Characters of the longest bar.
const WIDTH: usize = 64;
/// Bars of a panel; more places than this share one.
const BARS: usize = 24;
/// Sequences that have a letter of their own.
const LETTERS: usize = 26;

/// The panels as text.
pub fn draw(panels: &[Panel]) -> String {
    let longest = panels.iter().map(|panel| panel.timeline.makespan()).max().unwrap_or(0);
    let mut text: String = panels.iter().map(|panel| draw_panel(panel, longest)).collect();
    let places = panels.first().map_or("", |panel| panel.timeline.place.as_str());
    let marks = match panels.iter().any(|panel| panel.timeline.sequences > LETTERS) {
        true => "# and = are tasks by turns (too many sequences for letters)",
        false => "letters are sequences",
    };
    text += &format!("time is counted in KV tiles; a place is {places}; {marks}\n");
    if let [before, after] = panels
        && after.timeline.makespan() > 0
    {
        let (was, is) = (before.timeline.makespan(), after.timeline.makespan());
        text += &format!("min-max ends after {}, proportional after {was}: {:.2}x\n", count(is as usize, "tile"), was as f64 / is as f64);
    }
    text
}

fn draw_panel(panel: &Panel, longest: u64) -> String {
    let timeline = &panel.timeline;
    let (end, places) = (count(timeline.makespan() as usize, "tile"), count(timeline.places.len(), "place"));
    let mut text = format!("{}\nends after {end} on {places}, {:.1} if shared out evenly\n", panel.title, timeline.even());
    let rows = merged(rows(timeline, longest));
    let label = |row: &Row| if row.first == row.last { row.first.to_string() } else { format!("{}-{}", row.first, row.last) };
    let width = rows.iter().map(|row| label(row).len()).max().unwrap_or(0).max(4);
    for row in &rows {
        text += &format!("{:>width$} |{}| {}\n", label(row), row.bar, row.end);
    }
    text + "\n"
}

/// One line: the bar of the places from `first` to `last`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    first: usize,
    last: usize,
    bar: String,
    end: u64,
}

/// The places, later ends first, as a tail is what to look for; of a group of places the one that ends last.
fn rows(timeline: &Timeline, longest: u64) -> Vec<Row> {
    let each = timeline.places.len().div_ceil(BARS).max(1);
    let mut order: Vec<&Vec<Stay>> = timeline.places.iter().collect();
    order.sort_by_key(|stays| std::cmp::Reverse(stays.last().map_or(0, |stay| stay.end)));
    let row = |(index, group): (usize, &[&Vec<Stay>])| Row {
        first: index * each,
        last: index * each + group.len() - 1,
        bar: bar(group[0], timeline, longest),
        end: group[0].last().map_or(0, |stay| stay.end),
    };
    order.chunks(each).enumerate().map(row).collect()
}

/// Rows that look alike as one.
fn merged(rows: Vec<Row>) -> Vec<Row> {
    let mut merged: Vec<Row> = vec![];
    for row in rows {
        match merged.last_mut() {
            Some(last) if (&last.bar, last.end) == (&row.bar, row.end) => last.last = row.last,
            _ => merged.push(row),
        }
    }
    merged
}

/// One place's stays, a letter a sequence while there are letters, scaled so that `longest` fills the width.
fn bar(stays: &[Stay], timeline: &Timeline, longest: u64) -> String {
    let column = |time: u64| (time as u128 * WIDTH as u128 / u128::from(longest.max(1))) as usize;
    let mut text = vec![b' '; WIDTH];
    for (task, stay) in stays.iter().enumerate() {
        let mark = match timeline.sequences > LETTERS {
            true => [b'#', b'='][task % 2],
            false => b'a' + stay.sequence as u8,
        };
        // At least one column, so that no task is invisible.
        let from = column(stay.start).min(WIDTH - 1);
        text[from..column(stay.end).max(from + 1)].fill(mark);
    }
    text.into_iter().map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_look_alike_are_one() {
        let stay = |sequence, start, end| Stay { sequence, start, end };
        let places = vec![vec![stay(0, 0, 4)], vec![stay(1, 0, 2)], vec![stay(1, 0, 2)], vec![stay(1, 0, 1), stay(2, 1, 2)]];
        let timeline = Timeline { places, place: "a core".to_string(), sequences: 3 };
        let rows = merged(rows(&timeline, 4));
        assert_eq!(rows.iter().map(|row| (row.first, row.last, row.end)).collect::<Vec<_>>(), [(0, 0, 4), (1, 2, 2), (3, 3, 2)]);
        assert!(rows[1].bar.starts_with("bb") && rows[2].bar.contains('c'));
        let many = Timeline { sequences: 27, ..timeline };
        assert_eq!(merged(super::rows(&many, 4)).iter().map(|row| row.last).collect::<Vec<_>>(), [0, 2, 3], "the last row is of two tasks");
        let one = Timeline { places: vec![vec![stay(0, 0, 1)]], place: "a core".to_string(), sequences: 1 };
        let text = draw_panel(&Panel { title: "t".into(), timeline: one }, 1);
        assert!(text.contains("ends after 1 tile on 1 place,"), "{text}");
    }
}
