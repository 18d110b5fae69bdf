//! Pieces of a module's text: statements, variables, operands.

use crate::error::{Error, Result};
use crate::inst::{Special, Ty};
use crate::parse::SHARED_BASE;

/// Most bytes of a kernel's variables: more is a mistake, or an attack on the host's memory.
const MOST_BYTES: usize = 512 << 10;
/// Largest alignment, which shared memory's start has.
const MOST_ALIGNED: usize = SHARED_BASE as usize;

/// A statement of the text.
pub struct Statement<'a> {
    pub text: &'a str,
    pub line: u32,
    pub end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Semicolon,
    Label,
    Open,
    Close,
}

/// Comments, and the directives that no semicolon ends, as blanks.
pub fn without_comments(text: &str) -> String {
    let is_bare = |line: &str| [".version", ".target", ".address_size"].iter().any(|name| line.trim_start().starts_with(name));
    let line = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        if is_bare(code) { "\n".to_string() } else { format!("{code}\n") }
    };
    text.lines().map(line).collect()
}

pub fn statements(text: &str) -> Result<Vec<Statement<'_>>> {
    let mut all = vec![];
    let (mut start, mut line, mut first_line, mut braces, mut quoted) = (0, 1, 1, 0, false);
    for (at, c) in text.char_indices() {
        let before = text[start..at].trim_start();
        if before.is_empty() {
            first_line = line;
        }
        let is_kernel = || before.contains(".entry") && !before.contains(['{', '=']);
        let end = match c {
            '\n' => {
                line += 1;
                None
            }
            '"' => {
                quoted = !quoted;
                None
            }
            _ if quoted => None,
            '{' if before.is_empty() || is_kernel() => Some(End::Open),
            '{' => {
                braces += 1;
                None
            }
            '}' if braces > 0 => {
                braces -= 1;
                None
            }
            '}' => Some(End::Close),
            ';' => Some(End::Semicolon),
            ':' if is_label(before, &text[at..]) => Some(End::Label),
            _ => None,
        };
        if let Some(end) = end {
            all.push(Statement { text: before.trim(), line: first_line, end });
            start = at + 1;
        }
    }
    match text[start..].trim() {
        "" => Ok(all),
        rest => Err(Error::Syntax { line: first_line, text: rest.to_string(), reason: "it does not end".to_string() }),
    }
}

/// Whether `before:` is a label; `::` is part of a modifier.
fn is_label(before: &str, rest: &str) -> bool {
    !rest.starts_with("::") && !before.is_empty() && before.chars().all(|c| c.is_ascii_alphanumeric() || "_$%".contains(c))
}

/// `.param .align 8 .b8 name[312]`, `.param .u64 name`, `.align 16 .b8 name[64]`: name, alignment, bytes.
pub fn variable(text: &str) -> Result<(String, usize, usize), String> {
    let mut words = text.split_whitespace().peekable();
    let (mut align, mut ty, mut name) = (None, None, "");
    while let Some(word) = words.next() {
        match word {
            ".param" => {}
            ".align" => align = Some(alignment(words.next().unwrap_or_default())?),
            _ if word.starts_with('.') && ty.is_none() => ty = Some(Ty::parse(&word[1..]).ok_or_else(|| format!("a variable of {word}"))?),
            _ if name.is_empty() && !word.starts_with('.') => name = word,
            _ => return Err(format!("a variable with {word}")),
        }
    }
    let element = ty.ok_or("a variable without a type")?.bytes();
    let (name, count) = match name.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse::<usize>().map_err(|_| format!("size {count}"))?),
        None => (name, 1),
    };
    Ok((name.to_string(), align.unwrap_or(element), at_most(element.saturating_mul(count))?))
}

pub fn at_most(bytes: usize) -> Result<usize, String> {
    if bytes <= MOST_BYTES { Ok(bytes) } else { Err(format!("{bytes} bytes of variables")) }
}

pub fn alignment(text: &str) -> Result<usize, String> {
    let align = text.parse::<usize>().ok().filter(|align| align.is_power_of_two() && *align <= MOST_ALIGNED);
    align.ok_or_else(|| format!("alignment {text}"))
}

/// Most threads of a CTA, of the directives between a kernel's parameters and its body.
pub fn max_threads(directives: &str) -> Result<Option<u32>, String> {
    let mut most = None;
    for directive in directives.split('.').skip(1) {
        let (name, values) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let values: Vec<&str> = values.split(',').map(str::trim).collect();
        match (name, &values[..]) {
            ("maxntid", [x] | [x, "1"] | [x, "1", "1"]) => most = Some(x.parse().map_err(|_| format!("{x} threads"))?),
            ("minnctapersm" | "maxnreg", _) => {}
            _ => return Err(format!("the directive .{}", directive.trim())),
        }
    }
    Ok(most)
}

/// Operands, at the commas outside of braces and brackets.
pub fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (vec![], 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

pub fn special(text: &str) -> Option<Special> {
    match text {
        "%laneid" => return Some(Special::LaneId),
        "%nsmid" => return Some(Special::Nsmid),
        "%cluster_ctarank" => return Some(Special::ClusterCtaRank),
        _ => {}
    }
    let (name, axis) = text.rsplit_once('.')?;
    let axis = ["x", "y", "z"].iter().position(|known| *known == axis)? as u8;
    Some(match name {
        "%tid" => Special::Tid(axis),
        "%ntid" => Special::Ntid(axis),
        "%ctaid" => Special::Ctaid(axis),
        "%nctaid" => Special::Nctaid(axis),
        _ => return None,
    })
}

pub fn immediate(text: &str) -> Option<u64> {
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u64::from_str_radix(bits, 16).ok().filter(|_| bits.len() == 8 && is_hex(bits));
    }
    let (digits, negative) = text.strip_prefix('-').map_or((text, false), |digits| (digits, true));
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok().filter(|_| is_hex(hex))?,
        // A zero in front would make it octal.
        None if digits.starts_with(['0', '+']) && digits != "0" => return None,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}
