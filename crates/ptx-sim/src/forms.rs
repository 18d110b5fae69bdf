//! The instructions that are supported, as they are written: modifiers in their order, operands by kind. All else is refused.

use crate::inst::{Operand, Ty};

/// An instruction's names; its modifiers (`a|b`: one of them, `?`: may be absent); its operands:
///
/// - `D`, `s`: a register, a source of the type (of a conversion's first, its last); `W`, `w`: twice as wide; `h`: two registers half as wide;
///   `c`: a source that may be wider, of which the low bits count;
/// - `I`, `i`, `q`: a register, a source of 32 bits, a source of 64; `P`, `p`: of predicates; `S`: 32 bits, and a predicate beside them or not;
/// - `V`, `v`: what is loaded or stored, in registers at least as wide as the type, as many as `.v2` or `.v4` says;
/// - `2`, `4`, `A`: so many registers of 32 bits, the sums of a `wgmma`;
/// - `a`: an address, `n`: a constant, `1`, `0`: that constant, `m`: all lanes, `X`: 64 bits or nothing, `L`: a label.
type Form = (&'static str, &'static str, &'static str);

const FORMS: &[Form] = &[
    ("mov", "pred|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64", "D s"),
    ("mov", "b32|b64", "D h"),
    ("mov", "b32|b64", "h s"),
    ("cvta", "to global u64", "D s"),
    ("add|sub", "s16|u16|s32|u32|s64|u64", "D s s"),
    ("add|sub|mul", "rn? f32|f16x2", "D s s"),
    ("mul", "lo|hi s16|u16|s32|u32|s64|u64", "D s s"),
    ("mul", "wide s16|u16|s32|u32", "W s s"),
    ("mad", "lo s16|u16|s32|u32|s64|u64", "D s s s"),
    ("mad", "wide s16|u16|s32|u32", "W s s w"),
    ("fma", "rn f32", "D s s s"),
    ("div", "rn f32", "D s s"),
    ("div|rem", "s16|u16|s32|u32|s64|u64", "D s s"),
    ("min|max", "s16|u16|s32|u32|s64|u64|f32|f16x2", "D s s"),
    ("copysign", "f32", "D s s"),
    ("abs|neg", "s16|s32|s64|f32", "D s"),
    ("ex2|lg2|rcp|sqrt", "approx ftz? f32", "D s"),
    ("rcp|sqrt", "rn f32", "D s"),
    ("and|or|xor", "pred|b16|b32|b64", "D s s"),
    ("not", "pred|b16|b32|b64", "D s"),
    ("shl", "b16|b32|b64", "D s i"),
    ("shr", "b16|u16|s16|b32|u32|s32|b64|u64|s64", "D s i"),
    ("popc|clz", "b32|b64", "I s"),
    ("brev", "b32|b64", "D s"),
    ("bfi", "b32|b64", "D s s i i"),
    ("bfe", "u32|s32|u64|s64", "D s i i"),
    ("prmt", "b32", "D s s s"),
    ("selp", "b16|u16|s16|b32|u32|s32|f32|b64|u64|s64", "D s s p"),
    ("setp", "eq|ne b16|b32|b64", "P s s"),
    ("setp", "eq|ne|lt|le|gt|ge s16|u16|s32|u32|s64|u64", "P s s"),
    ("setp", "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan f32", "P s s"),
    ("setp", "eq|ne|lt|le|gt|ge and|or|xor s16|u16|s32|u32|s64|u64", "P s s p"),
    ("setp", "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan and|or|xor f32", "P s s p"),
    ("cvt", "u16|s16|u32|s32|u64|s64 u16|s16|u32|s32|u64|s64", "D c"),
    ("cvt", "rn f32 u16|s16|u32|s32|u64|s64", "D c"),
    ("cvt", "rni|rzi|rmi|rpi u16|s16|u32|s32|u64|s64|f32 f32", "D s"),
    ("cvt", "f32 f16|bf16", "D s"),
    ("cvt", "rn f16|bf16 f32", "D s"),
    ("cvt", "rn f16x2|bf16x2 f32", "D s s"),
    ("cvt", "rn satfinite e4m3x2 f32", "D s s"),
    ("cvt", "rn satfinite e4m3x2 f16x2", "D s"),
    ("cvt", "rn f16x2 e4m3x2", "D s"),
    ("ld", "global|shared|local|param v2|v4? b8|u8|b16|u16|b32|u32|s32|f32|b64|u64|s64", "V a"),
    ("ld", "relaxed gpu global v2|v4? b32|u32|s32|f32|b64|u64|s64", "V a"),
    ("st", "global|shared|local v2|v4? b8|u8|b16|u16|b32|u32|s32|f32|b64|u64|s64", "a v"),
    ("bra", "uni?", "L"),
    ("ret|exit", "", ""),
    ("createpolicy", "fractional L2::evict_first b64", "D"),
    ("prefetch", "global L2", "a"),
    ("griddepcontrol", "wait|launch_dependents", ""),
    ("setmaxnreg", "inc|dec sync aligned u32", "n"),
    ("shfl", "sync idx|up|down|bfly b32", "S i i i i"),
    ("vote", "sync any|all pred", "P p i"),
    ("vote", "sync ballot b32", "I p i"),
    ("redux", "sync add|min|max u32|s32", "I i i"),
    ("redux", "sync and|or|xor b32", "I i i"),
    ("bar", "warp sync", "m"),
    ("bar", "sync", "i"),
    ("bar", "sync|arrive", "i i"),
    ("barrier", "cluster arrive relaxed aligned", ""),
    ("barrier", "cluster wait acquire? aligned", ""),
    ("cp", "async ca|cg shared global L2::128B?", "a a n"),
    ("cp", "async ca|cg shared global L2::128B?", "a a n i"),
    ("cp", "async ca|cg shared global L2::cache_hint L2::128B?", "a a n i q"),
    ("cp", "async commit_group", ""),
    ("cp", "async wait_group", "n"),
    ("ldmatrix", "sync aligned m8n8 x4 trans? shared b16", "4 a"),
    ("mma", "sync aligned m16n8k16 row col f32 f16 f16 f32", "4 4 2 4"),
    ("mma", "sync aligned m16n8k16 row col f32 bf16 bf16 f32", "4 4 2 4"),
    ("mma", "sync aligned m16n8k32 row col f32 e4m3 e4m3 f32", "4 4 2 4"),
    ("wgmma", "fence|commit_group sync aligned", ""),
    ("wgmma", "wait_group sync aligned", "n"),
    ("wgmma", "mma_async sync aligned m64n64k16|m64n128k16 f32 f16 f16", "A 4 q p 1 1 n"),
    ("wgmma", "mma_async sync aligned m64n64k16|m64n128k16 f32 f16 f16", "A q q p 1 1 0 n"),
    ("wgmma", "mma_async sync aligned m64n64k16|m64n128k16 f32 bf16 bf16", "A 4 q p 1 1 n"),
    ("wgmma", "mma_async sync aligned m64n64k16|m64n128k16 f32 bf16 bf16", "A q q p 1 1 0 n"),
    ("wgmma", "mma_async sync aligned m64n64k32|m64n128k32 f32 e4m3 e4m3", "A 4 q p 1 1"),
    ("wgmma", "mma_async sync aligned m64n64k32|m64n128k32 f32 e4m3 e4m3", "A q q p 1 1"),
    ("fence", "proxy async shared::cta?", ""),
    ("fence", "mbarrier_init release cluster", ""),
    ("mbarrier", "init shared::cta b64", "a i"),
    ("mbarrier", "arrive expect_tx shared::cta b64", "X a i"),
    // Of the cluster: what is sent is not seen by who acquires it for the CTA alone.
    ("mbarrier", "try_wait parity acquire cluster shared::cta b64", "P a i"),
    ("mapa", "shared::cluster u32", "I i i"),
    ("st", "async shared::cluster mbarrier::complete_tx::bytes v2|v4? b32|u32|s32|f32", "a v a"),
];

/// Refuses what is not written like one of the forms; `widths`: bytes of each register, 1 of predicates.
pub fn check(mnemonic: &str, operands: &[Operand], widths: &[u8]) -> Result<(), String> {
    let parts: Vec<&str> = mnemonic.split('.').collect();
    let named = FORMS.iter().filter(|(names, ..)| names.split('|').any(|name| name == parts[0]));
    let mut written = named.filter(|(_, modifiers, _)| has_modifiers(modifiers, &parts[1..])).peekable();
    if written.peek().is_none() {
        return Err(format!("{mnemonic} is not supported"));
    }
    let kinds = Kinds::of(&parts, widths);
    if written.any(|(.., wanted)| kinds.are(wanted, operands)) {
        return kinds.check_size(&parts, operands);
    }
    Err(format!("{mnemonic} is not supported with these operands"))
}

fn has_modifiers(wanted: &str, mut parts: &[&str]) -> bool {
    for token in wanted.split_whitespace() {
        let (names, is_optional) = token.strip_suffix('?').map_or((token, false), |names| (names, true));
        match parts.split_first() {
            Some((part, rest)) if names.split('|').any(|name| name == *part) => parts = rest,
            _ if is_optional => {}
            _ => return false,
        }
    }
    parts.is_empty()
}

/// What the kinds of operands mean for one mnemonic.
struct Kinds<'a> {
    widths: &'a [u8],
    /// Bytes of the first type, and of the last.
    to: usize,
    from: usize,
    /// Elements of a load or store.
    elements: usize,
    /// Registers of a product's sums.
    sums: usize,
}

impl<'a> Kinds<'a> {
    fn of(parts: &[&str], widths: &'a [u8]) -> Self {
        let mut types = parts.iter().filter_map(|part| Ty::parse(part));
        let to = types.next().map_or(4, Ty::bytes);
        let has = |part: &str| parts.contains(&part);
        let elements = [1, 2, 4][usize::from(has("v2")) + 2 * usize::from(has("v4"))];
        let sums = if parts.iter().any(|part| part.starts_with("m64n128")) { 64 } else { 32 };
        Self { widths, to, from: types.next_back().map_or(to, Ty::bytes), elements, sums }
    }

    fn are(&self, wanted: &str, operands: &[Operand]) -> bool {
        wanted.split_whitespace().count() == operands.len()
            && wanted.split_whitespace().zip(operands).all(|(kind, operand)| self.is(kind, operand))
    }

    fn is(&self, kind: &str, operand: &Operand) -> bool {
        match kind {
            "D" => self.register(operand, self.to),
            "W" => self.register(operand, 2 * self.to),
            "I" => self.register(operand, 4),
            "P" => self.register(operand, 1),
            "X" => *operand == Operand::Sink || self.register(operand, 8),
            "s" => self.source(operand, self.from),
            "c" => self.source(operand, self.from) || self.at_least(operand),
            "w" => self.source(operand, 2 * self.from),
            "i" => self.source(operand, 4),
            "q" => self.source(operand, 8),
            "p" => self.source(operand, 1),
            "S" => match operand {
                Operand::Vector(both) => both.len() == 2 && self.register(&both[0], 4) && self.register(&both[1], 1),
                one => self.register(one, 4),
            },
            "V" => self.is_alike(operand) && self.data(operand, |one| *one == Operand::Sink && self.elements > 1 || self.at_least(one)),
            "v" => self.data(operand, |one| matches!(one, Operand::Imm(_)) || self.at_least(one)),
            "h" => self.registers(operand, 2, self.to / 2),
            "2" => self.registers(operand, 2, 4),
            "4" => self.registers(operand, 4, 4),
            "A" => self.registers(operand, self.sums, 4),
            "a" => matches!(operand, Operand::Address { base, .. } if base.is_none_or(|base| self.widths[base as usize] >= 4)),
            "n" => matches!(operand, Operand::Imm(_)),
            "0" => *operand == Operand::Imm(0),
            "1" => *operand == Operand::Imm(1),
            "m" => matches!(operand, Operand::Imm(mask) if *mask as u32 == u32::MAX),
            "L" => matches!(operand, Operand::Target(_)),
            _ => false,
        }
    }

    fn register(&self, operand: &Operand, bytes: usize) -> bool {
        matches!(operand, Operand::Reg(register) if usize::from(self.widths[*register as usize]) == bytes)
    }

    fn at_least(&self, operand: &Operand) -> bool {
        matches!(operand, Operand::Reg(register) if self.widths[*register as usize] >= 2 && usize::from(self.widths[*register as usize]) >= self.from)
    }

    /// Whether a vector's registers are of one width.
    fn is_alike(&self, operand: &Operand) -> bool {
        let Operand::Vector(all) = operand else { return true };
        let mut widths =
            all.iter().filter_map(|one| if let Operand::Reg(register) = one { Some(self.widths[*register as usize]) } else { None });
        let first = widths.next();
        widths.all(|width| Some(width) == first)
    }

    fn source(&self, operand: &Operand, bytes: usize) -> bool {
        match operand {
            Operand::Imm(_) => true,
            Operand::Special(_) => bytes == 4,
            other => self.register(other, bytes),
        }
    }

    fn data(&self, operand: &Operand, fits: impl Fn(&Operand) -> bool) -> bool {
        match operand {
            Operand::Vector(all) => self.elements > 1 && all.len() == self.elements && all.iter().all(fits),
            one => self.elements == 1 && fits(one),
        }
    }

    fn registers(&self, operand: &Operand, count: usize, bytes: usize) -> bool {
        matches!(operand, Operand::Vector(all) if all.len() == count && all.iter().all(|one| self.register(one, bytes)))
    }

    /// Accesses are of at most 16 bytes, stores to shared memory of whole words: races are found by words.
    fn check_size(&self, parts: &[&str], operands: &[Operand]) -> Result<(), String> {
        let bytes = self.from * self.elements;
        match (parts[0], parts.get(1).copied().unwrap_or_default()) {
            ("ld" | "st", _) if bytes > 16 => Err(format!("{bytes} bytes at once")),
            ("st", "shared") if bytes < 4 => Err("a store of less than 4 bytes to shared memory is not supported".to_string()),
            ("cp", "async") if operands.len() > 2 => match (parts[2], &operands[2]) {
                ("ca", Operand::Imm(4 | 8 | 16)) | ("cg", Operand::Imm(16)) => Ok(()),
                _ => Err("a copy of so many bytes".to_string()),
            },
            _ => Ok(()),
        }
    }
}
