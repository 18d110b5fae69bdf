//! Operands and modifiers as the disassembler prints them.

use std::collections::HashMap;

/// First number of the vector registers in the numbering that [`Regs`] uses; AGPRs follow the 256 VGPRs.
pub const VGPR: u16 = 128;
/// First number of the accumulation registers.
pub const AGPR: u16 = VGPR + 256;
/// Registers altogether.
pub const REGISTERS: usize = AGPR as usize + 256;
/// VCC's low half.
pub const VCC: u16 = 106;
/// M0.
pub const M0: u16 = 124;
/// EXEC's low half.
pub const EXEC: u16 = 126;

/// A run of registers: SGPRs (with VCC 106, M0 124, EXEC 126) from 0, VGPRs from [`VGPR`], AGPRs from [`AGPR`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regs {
    /// First register.
    pub first: u16,
    /// How many.
    pub count: u16,
}

impl Regs {
    /// A run.
    pub fn new(first: u16, count: u16) -> Self {
        Self { first, count }
    }

    /// Whether these are VGPRs or AGPRs.
    pub fn is_vector(self) -> bool {
        self.first >= VGPR
    }

    /// Index into the vector register file.
    pub fn vector(self) -> usize {
        usize::from(self.first - VGPR)
    }
}

/// The disassembler's name of a register number.
pub fn register_name(register: u16) -> String {
    match register {
        106 => "vcc_lo".into(),
        107 => "vcc_hi".into(),
        124 => "m0".into(),
        126 => "exec_lo".into(),
        127 => "exec_hi".into(),
        r if r >= AGPR => format!("a{}", r - AGPR),
        r if r >= VGPR => format!("v{}", r - VGPR),
        r => format!("s{r}"),
    }
}

/// A constant in an instruction; its bits depend on the operand's type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Imm {
    /// An inline integer.
    Int(i64),
    /// A 32-bit literal.
    Literal(u32),
    /// An inline floating-point number.
    Float(f64),
    /// The inline 1 / (2 pi).
    InvTwoPi,
}

/// What an operand is.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// Registers.
    Regs(Regs),
    /// A constant.
    Imm(Imm),
    /// `off`: no address register.
    Off,
    /// Anything else: a symbol, a hardware register, an `sdst` named null.
    Other(String),
}

/// An operand with its sign modifiers.
#[derive(Debug, Clone, PartialEq)]
pub struct Operand {
    /// Where the value is.
    pub place: Place,
    /// `-x`.
    pub neg: bool,
    /// `|x|`.
    pub abs: bool,
    /// `sext(x)`.
    pub sext: bool,
}

impl Operand {
    /// The registers, where it is a register operand.
    pub fn regs(&self) -> Option<Regs> {
        match self.place {
            Place::Regs(regs) => Some(regs),
            _ => None,
        }
    }

    fn parse(text: &str) -> Self {
        let (mut neg, mut abs, mut sext, mut rest) = (false, false, false, text.trim());
        // "-1" is a constant, "-v1" and "-|v1|" are negated registers.
        if let Some(inner) = rest.strip_prefix('-')
            && !inner.starts_with(|c: char| c.is_ascii_digit())
        {
            (neg, rest) = (true, inner);
        }
        if let Some(inner) = rest.strip_prefix("neg(").and_then(|r| r.strip_suffix(')')) {
            (neg, rest) = (true, inner);
        }
        if let Some(inner) = rest.strip_prefix('|').and_then(|r| r.strip_suffix('|')) {
            (abs, rest) = (true, inner);
        }
        if let Some(inner) = rest.strip_prefix("sext(").and_then(|r| r.strip_suffix(')')) {
            (sext, rest) = (true, inner);
        }
        Self { place: place(rest), neg, abs, sext }
    }
}

fn place(text: &str) -> Place {
    let named = |first, count| Place::Regs(Regs::new(first, count));
    match text {
        "vcc" => return named(VCC, 2),
        "vcc_lo" => return named(VCC, 1),
        "vcc_hi" => return named(VCC + 1, 1),
        "exec" => return named(EXEC, 2),
        "exec_lo" => return named(EXEC, 1),
        "exec_hi" => return named(EXEC + 1, 1),
        "flat_scratch" => return named(102, 2),
        "flat_scratch_lo" => return named(102, 1),
        "flat_scratch_hi" => return named(103, 1),
        "m0" => return named(M0, 1),
        "off" => return Place::Off,
        "0.15915494" | "0.15915494309189532" => return Place::Imm(Imm::InvTwoPi),
        _ => {}
    }
    if let Some(regs) = register_run(text) {
        return Place::Regs(regs);
    }
    // A literal that an inline constant could have encoded is marked as one.
    let text = text.strip_prefix("lit(").and_then(|t| t.strip_suffix(')')).unwrap_or(text);
    if let Some(hex) = text.strip_prefix("0x")
        && let Ok(bits) = u32::from_str_radix(hex, 16)
    {
        return Place::Imm(Imm::Literal(bits));
    }
    if let Ok(value) = text.parse::<i64>() {
        return Place::Imm(Imm::Int(value));
    }
    if text.contains('.')
        && let Ok(value) = text.parse::<f64>()
    {
        return Place::Imm(Imm::Float(value));
    }
    Place::Other(text.to_string())
}

fn register_run(text: &str) -> Option<Regs> {
    let (base, limit, rest) = match text.as_bytes().first()? {
        b's' => (0, 102, &text[1..]),
        b'v' => (VGPR, 256, &text[1..]),
        b'a' => (AGPR, 256, &text[1..]),
        _ => return None,
    };
    let (first, last) = match rest.strip_prefix('[').and_then(|r| r.strip_suffix(']')) {
        Some(range) => {
            let (first, last) = range.split_once(':')?;
            (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?)
        }
        None => {
            let one = rest.parse::<u16>().ok()?;
            (one, one)
        }
    };
    (first <= last && last < limit).then(|| Regs::new(base + first, last - first + 1))
}

/// An instruction's text, taken apart.
#[derive(Debug, Clone)]
pub struct Parsed<'a> {
    /// Mnemonic with its encoding suffix.
    pub mnemonic: &'a str,
    /// Operands in order.
    pub operands: Vec<Operand>,
    /// `name:value` modifiers (value empty for flags); a modifier that is not taken is an error.
    modifiers: HashMap<String, String>,
}

impl<'a> Parsed<'a> {
    /// Splits `text`.
    pub fn new(text: &'a str) -> Self {
        let (mnemonic, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut operands = Vec::new();
        let mut modifiers = HashMap::new();
        // The last comma-separated piece holds the last operand and, after blanks, the modifiers.
        let pieces = split_outside(rest.trim(), ',');
        let count = pieces.len();
        for (i, piece) in pieces.into_iter().enumerate() {
            let mut words = split_outside(piece.trim(), ' ').into_iter().filter(|word| !word.is_empty());
            if let Some(first) = words.next() {
                if i + 1 == count && i == 0 && is_modifier(&first) {
                    add_modifier(&mut modifiers, &first);
                } else {
                    operands.push(Operand::parse(&first));
                }
            }
            words.for_each(|word| add_modifier(&mut modifiers, &word));
        }
        Self { mnemonic, operands, modifiers }
    }

    /// Takes a modifier's value.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.modifiers.remove(name)
    }

    /// Takes a flag.
    pub fn flag(&mut self, name: &str) -> bool {
        self.take(name).is_some()
    }

    /// Whether a flag is there.
    pub fn has(&self, name: &str) -> bool {
        self.modifiers.contains_key(name)
    }

    /// Takes an integer modifier.
    pub fn int(&mut self, name: &str) -> Result<Option<i64>, String> {
        self.take(name).map(|value| integer(&value).ok_or_else(|| format!("modifier {name}:{value}"))).transpose()
    }

    /// Takes a bit list such as `op_sel:[0,1]`, as a mask.
    pub fn bits(&mut self, name: &str) -> Result<Option<u32>, String> {
        Ok(self.list(name)?.map(|values| values.iter().enumerate().fold(0, |mask, (i, &bit)| mask | u32::from(bit != 0) << i)))
    }

    /// Takes a list such as `quad_perm:[0,1,2,3]`.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<i64>>, String> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let inner = value.strip_prefix('[').and_then(|v| v.strip_suffix(']'));
        let parsed = inner.and_then(|inner| inner.split(',').map(|item| integer(item.trim())).collect());
        parsed.map(Some).ok_or_else(|| format!("modifier {name}:{value}"))
    }

    /// An error where a modifier was not understood.
    pub fn finish(&self) -> Result<(), String> {
        match self.modifiers.iter().next() {
            Some((name, value)) if value.is_empty() => Err(format!("modifier {name}")),
            Some((name, value)) => Err(format!("modifier {name}:{value}")),
            None => Ok(()),
        }
    }
}

/// A decimal or hexadecimal integer.
pub fn integer(text: &str) -> Option<i64> {
    match text.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

fn is_modifier(word: &str) -> bool {
    word.contains(':') && !word.contains('[') && !word.contains('(')
}

fn add_modifier(modifiers: &mut HashMap<String, String>, word: &str) {
    let (name, value) = word.split_once(':').unwrap_or((word, ""));
    modifiers.insert(name.to_string(), value.to_string());
}

/// Splits at `separator` outside brackets and quotes.
fn split_outside(text: &str, separator: char) -> Vec<String> {
    let (mut depth, mut pieces, mut piece) = (0i32, Vec::new(), String::new());
    for c in text.chars() {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            _ => {}
        }
        if c == separator && depth == 0 {
            pieces.push(std::mem::take(&mut piece));
        } else {
            piece.push(c);
        }
    }
    if !piece.trim().is_empty() {
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_and_modifiers_are_taken_apart() {
        let mut parsed = Parsed::new("v_fma_f32 v1, -|v2|, s[4:5], 0x3f000000 op_sel:[0,1,0] clamp");
        assert_eq!(parsed.mnemonic, "v_fma_f32");
        assert_eq!(parsed.operands.len(), 4);
        assert!(parsed.operands[1].neg && parsed.operands[1].abs);
        assert_eq!(parsed.operands[2].regs(), Some(Regs::new(4, 2)));
        assert_eq!(parsed.operands[3].place, Place::Imm(Imm::Literal(0x3f00_0000)));
        assert_eq!(parsed.bits("op_sel").unwrap(), Some(2));
        assert!(parsed.finish().is_err());
        assert!(parsed.flag("clamp"));
        assert!(parsed.finish().is_ok());
        assert_eq!(Parsed::new("v_mov_b32_e32 v1, -16").operands[1].place, Place::Imm(Imm::Int(-16)));
    }
}
