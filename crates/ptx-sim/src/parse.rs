//! Reads a module's text: kernels with their parameters, shared variables, registers and labels.

use std::collections::HashMap;

use crate::decode;
use crate::error::{Error, Result};
use crate::inst::{Inst, Op, Operand, Special, Ty};

/// Where shared memory starts: what is below belongs to the system.
pub const SHARED_BASE: u32 = 1024;

/// A kernel as it was read.
#[derive(Debug, Default)]
pub struct Program {
    pub name: String,
    pub insts: Vec<Inst>,
    /// Registers of a lane.
    pub registers: usize,
    /// Bytes of the parameters.
    pub param_bytes: usize,
    /// Bytes of the shared variables whose size is known.
    pub static_shared: u32,
    /// Bytes of a lane's own memory.
    pub local_bytes: usize,
    /// Alignment of the shared memory of the launch's size, behind those.
    pub dynamic_align: u32,
    /// Most threads of a CTA, where the kernel says so.
    pub max_threads: Option<u32>,
}

/// What a name stands for.
#[derive(Debug, Clone, Copy)]
enum Symbol {
    Register(u32),
    /// An address in the parameters, in shared or in local memory.
    Address(u64),
    Label(u32),
}

/// A statement of the text.
struct Statement<'a> {
    text: &'a str,
    line: u32,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Semicolon,
    Label,
    Open,
    Close,
}

/// The module's kernels.
pub fn module(text: &str) -> Result<Vec<Program>> {
    let text = without_comments(text);
    let mut reader = Reader::default();
    for statement in statements(&text)? {
        reader.take(&statement)?;
    }
    Ok(reader.programs)
}

/// Comments, and the directives that no semicolon ends, as blanks.
fn without_comments(text: &str) -> String {
    let is_bare = |line: &str| [".version", ".target", ".address_size"].iter().any(|name| line.trim_start().starts_with(name));
    let line = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        if is_bare(code) { "\n".to_string() } else { format!("{code}\n") }
    };
    text.lines().map(line).collect()
}

fn statements(text: &str) -> Result<Vec<Statement<'_>>> {
    let mut all = vec![];
    let (mut start, mut line, mut first_line, mut braces, mut quoted) = (0, 1, 1, 0, false);
    for (at, c) in text.char_indices() {
        let before = text[start..at].trim_start();
        if before.is_empty() {
            first_line = line;
        }
        let is_kernel = before.contains(".entry") && !before.contains(['{', '=']);
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
            '{' if before.is_empty() || is_kernel => Some(End::Open),
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

#[derive(Default)]
struct Reader {
    programs: Vec<Program>,
    /// Names by scope, the module's first.
    scopes: Vec<HashMap<String, Symbol>>,
    /// Branches of the open scopes whose labels are not read yet: instruction, label, scope.
    branches: Vec<(usize, String, usize)>,
    /// Shared variables of unknown size, of the module: name and alignment.
    dynamic: Vec<(String, u32)>,
}

impl Reader {
    fn take(&mut self, statement: &Statement<'_>) -> Result<()> {
        let fail = |reason: String| Error::Syntax { line: statement.line, text: statement.text.to_string(), reason };
        match statement.end {
            End::Open if self.scopes.is_empty() => self.kernel(statement.text).map_err(fail),
            End::Open => {
                self.scopes.push(HashMap::new());
                Ok(())
            }
            End::Close => self.close().map_err(fail),
            _ if self.scopes.is_empty() => self.module_variable(statement.text).map_err(fail),
            End::Label => {
                let here = self.program().insts.len() as u32;
                self.define(statement.text, Symbol::Label(here));
                Ok(())
            }
            End::Semicolon if statement.text.starts_with('.') => self.directive(statement.text).map_err(fail),
            End::Semicolon if statement.text.is_empty() => Ok(()),
            End::Semicolon => self.instruction(statement.text, statement.line).map_err(fail),
        }
    }

    fn program(&mut self) -> &mut Program {
        if self.programs.is_empty() {
            self.programs.push(Program::default());
        }
        let last = self.programs.len() - 1;
        &mut self.programs[last]
    }

    fn define(&mut self, name: &str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_string(), symbol);
        }
    }

    fn lookup(&self, name: &str) -> Option<Symbol> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    /// Outside kernels only memory of the launch's size may be declared. NVRTC also writes out C++'s constants, which nothing names.
    fn module_variable(&mut self, text: &str) -> Result<(), String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            [".extern", ".shared", ".align", align, _, name] => {
                let align = align.parse().map_err(|_| format!("alignment {align}"))?;
                self.dynamic.push((name.trim_end_matches("[]").to_string(), align));
                Ok(())
            }
            [".global", ..] => Ok(()),
            _ => Err("not supported outside a kernel".to_string()),
        }
    }

    /// `.visible .entry name(params) directives`.
    fn kernel(&mut self, header: &str) -> Result<(), String> {
        let (_, rest) = header.split_once(".entry").ok_or("not a kernel")?;
        let (name, rest) = rest.split_once('(').ok_or("no parameters")?;
        let (params, rest) = rest.split_once(')').ok_or("no end of the parameters")?;
        let mut program = Program { name: name.trim().to_string(), dynamic_align: 1, ..Program::default() };
        self.scopes.push(HashMap::new());
        for param in params.split(',').filter(|param| !param.trim().is_empty()) {
            let (name, align, bytes) = variable(param.trim())?;
            program.param_bytes = program.param_bytes.next_multiple_of(align);
            self.define(&name, Symbol::Address(program.param_bytes as u64));
            program.param_bytes += bytes;
        }
        if let Some((_, most)) = rest.split_once(".maxntid") {
            program.max_threads = most.split(',').next().and_then(|x| x.split_whitespace().next()).and_then(|x| x.parse().ok());
        }
        self.programs.push(program);
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        let depth = self.scopes.len().checked_sub(1).ok_or("no block is open")?;
        let is_kernel = depth == 0;
        for (inst, label, scope) in std::mem::take(&mut self.branches) {
            match self.lookup(&label) {
                Some(Symbol::Label(target)) => {
                    if let Some(last) = self.program().insts[inst].operands.last_mut() {
                        *last = Operand::Target(target);
                    }
                }
                _ if is_kernel => return Err(format!("no label {label}")),
                // It may stand farther out.
                _ => self.branches.push((inst, label, scope.min(depth - 1))),
            }
        }
        self.scopes.pop();
        Ok(())
    }

    fn directive(&mut self, text: &str) -> Result<(), String> {
        if text.starts_with(".pragma") {
            return Ok(());
        }
        if let Some(rest) = text.strip_prefix(".reg") {
            return self.registers(rest.trim());
        }
        if let Some(rest) = text.strip_prefix(".shared") {
            let (name, align, bytes) = variable(rest.trim())?;
            let at = self.program().static_shared.next_multiple_of(align as u32);
            self.program().static_shared = at + bytes as u32;
            self.define(&name, Symbol::Address(u64::from(SHARED_BASE + at)));
            return Ok(());
        }
        if let Some(rest) = text.strip_prefix(".local") {
            let (name, align, bytes) = variable(rest.trim())?;
            let at = self.program().local_bytes.next_multiple_of(align);
            self.program().local_bytes = at + bytes;
            self.define(&name, Symbol::Address(at as u64));
            return Ok(());
        }
        Err("not supported".to_string())
    }

    /// `.type name<count>` or `.type a, b`.
    fn registers(&mut self, text: &str) -> Result<(), String> {
        let (_, names) = text.split_once(char::is_whitespace).ok_or("no name")?;
        for name in names.split(',').map(str::trim) {
            let several = name.split_once('<').map(|(stem, count)| (stem, count.trim_end_matches('>').parse::<u32>()));
            let first = self.program().registers as u32;
            match several {
                Some((stem, Ok(count))) => {
                    (0..count).for_each(|i| self.define(&format!("{stem}{i}"), Symbol::Register(first + i)));
                    self.program().registers += count as usize;
                }
                Some((_, Err(error))) => return Err(error.to_string()),
                None => {
                    self.define(name, Symbol::Register(first));
                    self.program().registers += 1;
                }
            }
        }
        Ok(())
    }

    fn instruction(&mut self, text: &str, line: u32) -> Result<(), String> {
        let (guard, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).ok_or("a guard without an instruction")?;
                let (name, negated) = name.strip_prefix('!').map_or((name, false), |name| (name, true));
                let Some(Symbol::Register(register)) = self.lookup(name) else { return Err(format!("no register {name}")) };
                (Some((register, negated)), rest.trim())
            }
            None => (None, text),
        };
        let (mnemonic, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let op = decode::op(mnemonic)?;
        let operands = match op {
            Op::Branch => vec![Operand::Target(u32::MAX)],
            _ => split(rest).into_iter().map(|operand| self.operand(operand)).collect::<Result<Vec<_>, _>>()?,
        };
        if op == Op::Branch {
            let at = (self.program().insts.len(), rest.trim().to_string(), self.scopes.len() - 1);
            self.branches.push(at);
        }
        let (op, operands) = decode::with_operands(op, mnemonic, operands)?;
        self.program().insts.push(Inst { guard, op, operands, line, text: text.split_whitespace().collect::<Vec<_>>().join(" ").into() });
        Ok(())
    }

    fn operand(&mut self, text: &str) -> Result<Operand, String> {
        let inner = |open, close| text.strip_prefix(open).and_then(|text: &str| text.strip_suffix(close));
        if let Some(list) = inner('{', '}') {
            return Ok(Operand::Vector(split(list).into_iter().map(|x| self.operand(x)).collect::<Result<_, _>>()?));
        }
        if let Some(address) = inner('[', ']') {
            return self.address(address.trim());
        }
        if let Some((a, b)) = text.split_once('|') {
            return Ok(Operand::Vector(vec![self.operand(a)?, self.operand(b)?]));
        }
        if text == "_" {
            return Ok(Operand::Sink);
        }
        if let Some(special) = special(text) {
            return Ok(Operand::Special(special));
        }
        match self.symbol(text) {
            Some(Symbol::Register(register)) => Ok(Operand::Reg(register)),
            Some(Symbol::Address(address)) => Ok(Operand::Imm(address)),
            Some(Symbol::Label(_)) => Err(format!("a label, {text}, as an operand")),
            None => immediate(text).map(Operand::Imm).ok_or_else(|| format!("unknown operand {text}")),
        }
    }

    /// A name's meaning; memory of the launch's size gets its place when it is first named, behind all that is declared before instructions.
    fn symbol(&mut self, name: &str) -> Option<Symbol> {
        if let Some(symbol) = self.lookup(name) {
            return Some(symbol);
        }
        let align = self.dynamic.iter().find(|(known, _)| known == name)?.1;
        self.program().dynamic_align = align;
        let at = self.program().static_shared.next_multiple_of(align);
        Some(Symbol::Address(u64::from(SHARED_BASE + at)))
    }

    fn address(&mut self, text: &str) -> Result<Operand, String> {
        let (name, offset) = match text.rsplit_once('+') {
            Some((name, offset)) => (name.trim(), immediate(offset.trim()).ok_or_else(|| format!("offset {offset}"))? as i64),
            None => (text, 0),
        };
        match self.operand(name)? {
            Operand::Reg(register) => Ok(Operand::Address { base: Some(register), offset }),
            Operand::Imm(address) => Ok(Operand::Address { base: None, offset: address as i64 + offset }),
            _ => Err(format!("address {text}")),
        }
    }
}

/// `.param .align 8 .b8 name[312]`, `.param .u64 name`, `.align 16 .b8 name[64]`: name, alignment, bytes.
fn variable(text: &str) -> Result<(String, usize, usize), String> {
    let mut words = text.split_whitespace().peekable();
    let (mut align, mut ty, mut name) = (None, None, "");
    while let Some(word) = words.next() {
        match word {
            ".param" => {}
            ".align" => align = words.next().and_then(|word| word.parse().ok()),
            _ if word.starts_with('.') => ty = Ty::parse(&word[1..]),
            _ => name = word,
        }
    }
    let element = ty.ok_or("a variable without a type")?.bytes();
    let (name, count) = match name.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().map_err(|_| format!("size {count}"))?),
        None => (name, 1),
    };
    Ok((name.to_string(), align.unwrap_or(element), element * count))
}

/// Operands, at the commas outside of braces and brackets.
fn split(text: &str) -> Vec<&str> {
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

fn special(text: &str) -> Option<Special> {
    let (name, axis) = match text.rsplit_once('.') {
        Some((name, axis)) => (name, ["x", "y", "z"].iter().position(|known| *known == axis)? as u8),
        None => (text, 0),
    };
    Some(match name {
        "%tid" => Special::Tid(axis),
        "%ntid" => Special::Ntid(axis),
        "%ctaid" => Special::Ctaid(axis),
        "%nctaid" => Special::Nctaid(axis),
        "%laneid" => Special::LaneId,
        "%nsmid" => Special::Nsmid,
        "%cluster_ctarank" => Special::ClusterCtaRank,
        _ => return None,
    })
}

fn immediate(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let (digits, negative) = text.strip_prefix('-').map_or((text, false), |digits| (digits, true));
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}
