//! The plan as bars in the terminal.

use crate::timeline::{Panel, Stay, Timeline};

/// Characters of the longest bar.
const WIDTH: usize = 64;
/// Bars of a panel; more places than this share one.
const BARS: usize = 24;

/// The panels as text.
pub fn draw(panels: &[Panel]) -> String {
    let longest = panels.iter().map(|panel| panel.timeline.makespan()).max().unwrap_or(0);
    let mut text: String = panels.iter().map(|panel| draw_panel(panel, longest)).collect();
    let places = panels.first().map_or("", |panel| panel.timeline.place);
    text += &format!("time is counted in KV tiles; a place is {places}; letters are sequences\n");
    if let [before, after] = panels
        && after.timeline.makespan() > 0
    {
        let (was, is) = (before.timeline.makespan(), after.timeline.makespan());
        text += &format!("min-max ends after {is} tiles, proportional after {was}: {:.2}x\n", was as f64 / is as f64);
    }
    text
}

fn draw_panel(panel: &Panel, longest: u64) -> String {
    let timeline = &panel.timeline;
    let (end, places, even) = (timeline.makespan(), timeline.places.len(), timeline.even());
    let mut text = format!("{}\nends after {end} tiles on {places} places, {even:.1} if shared out evenly\n", panel.title);
    let each = places.div_ceil(BARS).max(1);
    // Later ends first, as a tail is what to look for.
    let mut order: Vec<&Vec<Stay>> = timeline.places.iter().collect();
    order.sort_by_key(|stays| std::cmp::Reverse(stays.last().map_or(0, |stay| stay.end)));
    for (index, group) in order.chunks(each).enumerate() {
        let end = group.first().and_then(|stays| stays.last()).map_or(0, |stay| stay.end);
        let label = if each == 1 { format!("{index:>4}") } else { format!("{:>4}-{:<4}", index * each, index * each + group.len() - 1) };
        text += &format!("{label} |{}| {end}\n", bar(group[0], timeline, longest));
    }
    text + "\n"
}

/// One place's stays, a letter a sequence, scaled so that `longest` fills the width.
fn bar(stays: &[Stay], timeline: &Timeline, longest: u64) -> String {
    let column = |time: u64| (time as u128 * WIDTH as u128 / u128::from(longest.max(1))) as usize;
    let mut text = vec![b' '; WIDTH];
    for stay in stays {
        let letter = if timeline.sequences <= 26 { b'a' + stay.sequence as u8 } else { b'a' + (stay.sequence % 26) as u8 };
        // At least one column, so that no task is invisible.
        let from = column(stay.start).min(WIDTH - 1);
        text[from..column(stay.end).max(from + 1)].fill(letter);
    }
    text.into_iter().map(char::from).collect()
}
