//! Reads a module's text: kernels with their parameters, shared variables, registers and labels.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::inst::{Inst, Op, Operand, Ty};
use crate::text::{End, Statement, alignment, at_most, immediate, max_threads, special, split, statements, variable, without_comments};
use crate::{decode, forms};

/// Where shared memory starts: what is below belongs to the system.
pub const SHARED_BASE: u32 = 1024;

/// Most registers of a kernel: more is a mistake, or an attack on the host's memory.
const MOST_REGISTERS: usize = 1 << 17;

/// A kernel as it was read.
#[derive(Debug, Default)]
pub struct Program {
    pub name: String,
    pub insts: Vec<Inst>,
    /// Registers of a lane: the bytes of each, 1 of predicates.
    pub registers: Vec<u8>,
    /// Bytes of the parameters.
    pub param_bytes: usize,
    /// Bytes of the shared variables whose size is known.
    pub static_shared: u32,
    /// Bytes of a lane's own memory.
    pub local_bytes: usize,
    /// Alignment of the shared memory of the launch's size, behind those, where the kernel names it.
    pub dynamic_align: Option<u32>,
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

/// The module's kernels.
pub fn module(text: &str) -> Result<Vec<Program>> {
    let text = without_comments(text);
    let mut reader = Reader::default();
    for statement in statements(&text)? {
        reader.take(&statement)?;
    }
    match reader.scopes.len() {
        0 => Ok(reader.programs),
        _ => Err(Error::Syntax { line: text.lines().count() as u32, text: String::new(), reason: "the kernel does not end".to_string() }),
    }
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
            End::Open if statement.text.is_empty() => {
                self.scopes.push(HashMap::new());
                Ok(())
            }
            End::Open => Err(fail("a kernel in a kernel".to_string())),
            End::Close if statement.text.is_empty() => self.close().map_err(fail),
            End::Close => Err(fail("no semicolon ends it".to_string())),
            _ if self.scopes.is_empty() => self.module_variable(statement.text).map_err(fail),
            End::Label => {
                let here = self.program().insts.len() as u32;
                self.define(statement.text, Symbol::Label(here)).map_err(fail)
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

    fn define(&mut self, name: &str, symbol: Symbol) -> Result<(), String> {
        let known = self.scopes.last_mut().and_then(|scope| scope.insert(name.to_string(), symbol));
        if known.is_none() { Ok(()) } else { Err(format!("{name} is declared twice")) }
    }

    fn lookup(&self, name: &str) -> Option<Symbol> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    /// Outside kernels only memory of the launch's size may be declared. NVRTC also writes out C++'s constants, which nothing names.
    fn module_variable(&mut self, text: &str) -> Result<(), String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            [".extern", ".shared", ".align", align, _, name] => {
                let align = alignment(align)? as u32;
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
        let mut program = Program { name: name.trim().to_string(), ..Program::default() };
        self.scopes.push(HashMap::new());
        for param in params.split(',').filter(|param| !param.trim().is_empty()) {
            let (name, align, bytes) = variable(param.trim())?;
            program.param_bytes = program.param_bytes.next_multiple_of(align);
            self.define(&name, Symbol::Address(program.param_bytes as u64))?;
            program.param_bytes = at_most(program.param_bytes + bytes)?;
        }
        program.max_threads = max_threads(rest)?;
        if self.programs.iter().any(|known| known.name == program.name) {
            return Err(format!("two kernels {}", program.name));
        }
        self.programs.push(program);
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        let depth = self.scopes.len().checked_sub(1).ok_or("no block is open")?;
        let is_kernel = depth == 0;
        for (inst, label, scope) in std::mem::take(&mut self.branches) {
            if scope != depth {
                self.branches.push((inst, label, scope));
                continue;
            }
            match self.scopes[depth].get(&label).copied() {
                Some(Symbol::Label(target)) => {
                    if let Some(last) = self.program().insts[inst].operands.last_mut() {
                        *last = Operand::Target(target);
                    }
                }
                _ if is_kernel => return Err(format!("no label {label}")),
                // It may stand farther out.
                _ => self.branches.push((inst, label, depth - 1)),
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
            if self.program().dynamic_align.is_some() {
                return Err("shared memory that is declared behind the use of the launch's is not supported".to_string());
            }
            let (name, align, bytes) = variable(rest.trim())?;
            let at = self.program().static_shared.next_multiple_of(align as u32);
            self.program().static_shared = at_most(at as usize + bytes)? as u32;
            return self.define(&name, Symbol::Address(u64::from(SHARED_BASE + at)));
        }
        if let Some(rest) = text.strip_prefix(".local") {
            let (name, align, bytes) = variable(rest.trim())?;
            let at = self.program().local_bytes.next_multiple_of(align);
            self.program().local_bytes = at_most(at + bytes)?;
            return self.define(&name, Symbol::Address(at as u64));
        }
        Err("not supported".to_string())
    }

    /// `.type name<count>` or `.type a, b`.
    fn registers(&mut self, text: &str) -> Result<(), String> {
        let (ty, names) = text.split_once(char::is_whitespace).ok_or("no name")?;
        let ty = ty.strip_prefix('.').and_then(Ty::parse).filter(|ty| *ty == Ty::Pred || ty.bytes() > 1);
        let width = ty.ok_or_else(|| format!("registers of {text} are not supported"))?.bytes() as u8;
        for name in names.split(',').map(str::trim) {
            let several = name.split_once('<').map(|(stem, count)| (stem, count.trim_end_matches('>').parse::<u32>()));
            let first = self.program().registers.len();
            let count = match &several {
                Some((_, Ok(count))) => *count as usize,
                Some((_, Err(error))) => return Err(error.to_string()),
                None => 1,
            };
            if first + count > MOST_REGISTERS {
                return Err(format!("more than {MOST_REGISTERS} registers"));
            }
            self.program().registers.resize(first + count, width);
            match several {
                Some((stem, _)) => (0..count).try_for_each(|i| self.define(&format!("{stem}{i}"), Symbol::Register((first + i) as u32)))?,
                None => self.define(name, Symbol::Register(first as u32))?,
            }
        }
        Ok(())
    }

    fn instruction(&mut self, text: &str, line: u32) -> Result<(), String> {
        let (guard, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).ok_or("a guard without an instruction")?;
                let (name, negated) = name.strip_prefix('!').map_or((name, false), |name| (name, true));
                let found = self.lookup(name);
                let Some(Symbol::Register(register)) = found.filter(|found| self.is_predicate(*found)) else {
                    return Err(format!("no predicate {name}"));
                };
                (Some((register, negated)), rest.trim())
            }
            None => (None, text),
        };
        let (mnemonic, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let operands = match mnemonic {
            "bra" | "bra.uni" => vec![Operand::Target(u32::MAX)],
            _ => split(rest).into_iter().map(|operand| self.operand(operand)).collect::<Result<Vec<_>, _>>()?,
        };
        let widths = &self.program().registers;
        forms::check(mnemonic, &operands, widths)?;
        let op = decode::with_operands(decode::op(mnemonic)?, &operands, widths);
        if op == Op::Branch {
            let at = (self.program().insts.len(), rest.trim().to_string(), self.scopes.len() - 1);
            self.branches.push(at);
        }
        self.program().insts.push(Inst { guard, op, operands, line, text: text.split_whitespace().collect::<Vec<_>>().join(" ").into() });
        Ok(())
    }

    fn is_predicate(&self, symbol: Symbol) -> bool {
        let widths = self.programs.last().map(|program| program.registers.as_slice()).unwrap_or_default();
        matches!(symbol, Symbol::Register(register) if widths[register as usize] == 1)
    }

    fn operand(&mut self, text: &str) -> Result<Operand, String> {
        let inner = |open, close| text.strip_prefix(open).and_then(|text: &str| text.strip_suffix(close));
        if let Some(list) = inner('{', '}') {
            return Ok(Operand::Vector(split(list).into_iter().map(|x| self.scalar(x)).collect::<Result<_, _>>()?));
        }
        if let Some(address) = inner('[', ']') {
            return self.address(address.trim());
        }
        if let Some((a, b)) = text.split_once('|') {
            return Ok(Operand::Vector(vec![self.scalar(a)?, self.scalar(b)?]));
        }
        self.scalar(text)
    }

    fn scalar(&mut self, text: &str) -> Result<Operand, String> {
        if text == "_" {
            return Ok(Operand::Sink);
        }
        if let Some(special) = special(text) {
            return Ok(Operand::Special(special));
        }
        match self.symbol(text)? {
            Some(Symbol::Register(register)) => Ok(Operand::Reg(register)),
            Some(Symbol::Address(address)) => Ok(Operand::Imm(address)),
            Some(Symbol::Label(_)) => Err(format!("a label, {text}, as an operand")),
            None => immediate(text).map(Operand::Imm).ok_or_else(|| format!("unknown operand {text}")),
        }
    }

    /// A name's meaning; memory of the launch's size gets its place when it is first named, behind all that is declared before instructions.
    fn symbol(&mut self, name: &str) -> Result<Option<Symbol>, String> {
        if let Some(symbol) = self.lookup(name) {
            return Ok(Some(symbol));
        }
        let Some(&(_, align)) = self.dynamic.iter().find(|(known, _)| known == name) else { return Ok(None) };
        if *self.program().dynamic_align.get_or_insert(align) != align {
            return Err("shared memory of the launch's size with two alignments is not supported".to_string());
        }
        let at = self.program().static_shared.next_multiple_of(align);
        Ok(Some(Symbol::Address(u64::from(SHARED_BASE + at))))
    }

    fn address(&mut self, text: &str) -> Result<Operand, String> {
        let (name, offset) = match text.rsplit_once('+') {
            Some((name, offset)) => (name.trim(), immediate(offset.trim()).ok_or_else(|| format!("offset {offset}"))? as i64),
            None => (text, 0),
        };
        match self.scalar(name)? {
            Operand::Reg(register) => Ok(Operand::Address { base: Some(register), offset }),
            Operand::Imm(address) => Ok(Operand::Address { base: None, offset: (address as i64).wrapping_add(offset) }),
            _ => Err(format!("address {text}")),
        }
    }
}
