//! Arithmetic: pure functions of registers' bits.

use half::{bf16, f16};

use crate::inst::{Binary, Bool, Compare, Round, Ternary, Ty, Unary};
use crate::warp::Lanes;

fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// PTX's NaN is one, whatever those were that it came from.
fn of_f32(x: f32) -> u64 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits().into() }
}

/// Of zeros the negative one is the smaller; of a NaN and a number, the number is both.
fn smaller(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
}

fn larger(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

/// Both halves of a packed value through `f`.
fn halves(a: u64, b: u64, f: impl Fn(f32, f32) -> f32) -> u64 {
    let half = |shift: u32| {
        let of = |bits: u64| f16::from_bits((bits >> shift) as u16).to_f32();
        f16_of(f(of(a), of(b))) << shift
    };
    half(0) | half(16)
}

/// Of one register, or of more, in all lanes.
pub type Function1 = fn(&Lanes, Ty) -> Lanes;
pub type Function2 = fn(&Lanes, &Lanes, Ty) -> Lanes;
pub type Function3 = fn(&Lanes, &Lanes, &Lanes, Ty) -> Lanes;

/// A function of a lane's bits as one of all lanes, which the compiler unrolls and inlines.
macro_rules! lanes {
    (|$a:pat_param, $ty:pat_param| $body:expr) => {
        |a, ty| std::array::from_fn(|lane| (|$a: u64, $ty: Ty| -> u64 { $body })(a[lane], ty))
    };
    (|$a:pat_param, $b:pat_param, $ty:pat_param| $body:expr) => {
        |a, b, ty| std::array::from_fn(|lane| (|$a: u64, $b: u64, $ty: Ty| -> u64 { $body })(a[lane], b[lane], ty))
    };
    (|$a:pat_param, $b:pat_param, $c:pat_param, $ty:pat_param| $body:expr) => {
        |a, b, c, ty| std::array::from_fn(|lane| (|$a: u64, $b: u64, $c: u64, $ty: Ty| -> u64 { $body })(a[lane], b[lane], c[lane], ty))
    };
}

/// The function of one operand; `None`: not for this type.
pub fn unary(op: Unary, ty: Ty) -> Option<Function1> {
    let is_float = ty == Ty::F32;
    let is_int = matches!(ty, Ty::Bits(_) | Ty::Signed(_) | Ty::Pred);
    Some(match op {
        Unary::Mov => lanes!(|a, _| a),
        Unary::Abs if is_float => lanes!(|a, _| a & 0x7fff_ffff),
        Unary::Abs if is_int => lanes!(|a, ty| ty.extend(a).unsigned_abs() as u64),
        Unary::Neg if is_float => lanes!(|a, _| a ^ 0x8000_0000),
        Unary::Neg if is_int => lanes!(|a, _| a.wrapping_neg()),
        Unary::Not if is_int => lanes!(|a, _| !a),
        Unary::Exp2 if is_float => lanes!(|a, _| of_f32(f64::from(f32_of(a)).exp2() as f32)),
        Unary::Log2 if is_float => lanes!(|a, _| of_f32(f64::from(f32_of(a)).log2() as f32)),
        Unary::Rcp if is_float => lanes!(|a, _| of_f32(1.0 / f32_of(a))),
        Unary::Sqrt if is_float => lanes!(|a, _| of_f32(f32_of(a).sqrt())),
        Unary::Popc if is_int => lanes!(|a, ty| u64::from((a & ty.mask()).count_ones())),
        Unary::Clz if is_int => lanes!(|a, ty| u64::from((a & ty.mask()).leading_zeros()) - (64 - 8 * ty.bytes() as u64)),
        Unary::Brev if is_int => lanes!(|a, ty| (a & ty.mask()).reverse_bits() >> (64 - 8 * ty.bytes())),
        _ => return None,
    })
}

/// `.ftz`: a subnormal F32 is a zero of its sign.
pub fn flushed(bits: u64) -> u64 {
    if f32_of(bits).is_subnormal() { bits & 0x8000_0000 } else { bits }
}

/// The function of two operands; `None`: not for this type.
pub fn binary(op: Binary, ty: Ty) -> Option<Function2> {
    match ty {
        Ty::F32 => binary_f32(op),
        Ty::F16x2 => Some(match op {
            Binary::Add => lanes!(|a, b, _| halves(a, b, |a, b| a + b)),
            Binary::Sub => lanes!(|a, b, _| halves(a, b, |a, b| a - b)),
            Binary::Mul => lanes!(|a, b, _| halves(a, b, |a, b| a * b)),
            Binary::Min => lanes!(|a, b, _| halves(a, b, smaller)),
            Binary::Max => lanes!(|a, b, _| halves(a, b, larger)),
            _ => return None,
        }),
        Ty::Bits(_) | Ty::Signed(_) | Ty::Pred => binary_int(op),
        _ => None,
    }
}

fn binary_f32(op: Binary) -> Option<Function2> {
    Some(match op {
        Binary::Add => lanes!(|a, b, _| of_f32(f32_of(a) + f32_of(b))),
        Binary::Sub => lanes!(|a, b, _| of_f32(f32_of(a) - f32_of(b))),
        Binary::Mul => lanes!(|a, b, _| of_f32(f32_of(a) * f32_of(b))),
        Binary::Div => lanes!(|a, b, _| of_f32(f32_of(a) / f32_of(b))),
        Binary::Min => lanes!(|a, b, _| of_f32(smaller(f32_of(a), f32_of(b)))),
        Binary::Max => lanes!(|a, b, _| of_f32(larger(f32_of(a), f32_of(b)))),
        // PTX: the sign of the first, the magnitude of the second.
        Binary::CopySign => lanes!(|a, b, _| a & 0x8000_0000 | b & 0x7fff_ffff),
        _ => return None,
    })
}

fn binary_int(op: Binary) -> Option<Function2> {
    Some(match op {
        Binary::Add => lanes!(|a, b, _| a.wrapping_add(b)),
        Binary::Sub => lanes!(|a, b, _| a.wrapping_sub(b)),
        Binary::Mul => lanes!(|a, b, _| a.wrapping_mul(b)),
        Binary::MulHi => lanes!(|a, b, ty| (ty.extend(a).wrapping_mul(ty.extend(b)) >> (8 * ty.bytes())) as u64),
        Binary::MulWide => lanes!(|a, b, ty| (ty.extend(a) * ty.extend(b)) as u64),
        // The hardware gives all ones for a divisor of zero.
        Binary::Div => lanes!(|a, b, ty| ty.extend(a).checked_div(ty.extend(b)).map_or(u64::MAX, |x| x as u64)),
        Binary::Rem => lanes!(|a, b, ty| ty.extend(a).checked_rem(ty.extend(b)).map_or(a, |x| x as u64)),
        Binary::Min => lanes!(|a, b, ty| if ty.rank(a) <= ty.rank(b) { a } else { b }),
        Binary::Max => lanes!(|a, b, ty| if ty.rank(a) >= ty.rank(b) { a } else { b }),
        Binary::And => lanes!(|a, b, _| a & b),
        Binary::Or => lanes!(|a, b, _| a | b),
        Binary::Xor => lanes!(|a, b, _| a ^ b),
        // A shift by more than the width gives what a shift by the width does.
        Binary::Shl => lanes!(|a, b, ty| if (b as u32) < 8 * ty.bytes() as u32 { a << (b as u32) } else { 0 }),
        Binary::Shr => lanes!(|a, b, ty| (ty.extend(a) >> (b as u32).min(8 * ty.bytes() as u32)) as u64),
        Binary::CopySign => return None,
    })
}

/// The function of three operands; `None`: not for this type.
pub fn ternary(op: Ternary, ty: Ty) -> Option<Function3> {
    let is_int = matches!(ty, Ty::Bits(_) | Ty::Signed(_));
    Some(match op {
        Ternary::Mad if ty == Ty::F32 => lanes!(|a, b, c, _| of_f32(f32_of(a).mul_add(f32_of(b), f32_of(c)))),
        Ternary::Mad if is_int => lanes!(|a, b, c, _| a.wrapping_mul(b).wrapping_add(c)),
        Ternary::MadWide if is_int => lanes!(|a, b, c, ty| ((ty.extend(a) * ty.extend(b)) as u64).wrapping_add(c)),
        Ternary::Prmt => lanes!(|a, b, selector, _| prmt(a, b, selector)),
        _ => return None,
    })
}

/// Four bytes of the eight of `a` and `b`; a selector's high bit asks for the byte's sign in all its bits.
fn prmt(a: u64, b: u64, selector: u64) -> u64 {
    let all = a & 0xffff_ffff | b << 32;
    let byte = |i: u32| {
        let pick = selector >> (4 * i) & 15;
        let byte = all >> (8 * (pick & 7)) & 0xff;
        let byte = if pick & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        byte << (8 * i)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// `a`'s low `length` bits in `b`'s place from `position` on.
pub fn bfi(a: u64, b: u64, position: u64, length: u64, ty: Ty) -> u64 {
    let width = 8 * ty.bytes() as u64;
    let (position, length) = ((position & 0xff).min(width), length & 0xff);
    let ones = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
    let mask = if position >= 64 { 0 } else { ones << position };
    b & !mask | (if position >= 64 { 0 } else { a << position }) & mask
}

/// `length` bits of `a` from `position` on, with their sign where the type has one.
pub fn bfe(a: u64, position: u64, length: u64, ty: Ty) -> u64 {
    let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
    if length == 0 {
        return 0;
    }
    let shifted = ty.extend(a) >> position.min(127);
    let keep = 128 - length.min(127);
    if matches!(ty, Ty::Signed(_)) { (shifted << keep >> keep) as u64 } else { ((shifted as u128) << keep >> keep) as u64 }
}

/// Whether `a` compares so to `b`.
pub fn compare(compare: Compare, a: u64, b: u64, ty: Ty) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = if ty == Ty::F32 { f32_of(a).partial_cmp(&f32_of(b)) } else { Some(ty.rank(a).cmp(&ty.rank(b))) };
    match compare {
        Compare::Eq => order == Some(Equal),
        Compare::Ne => matches!(order, Some(Less | Greater)),
        Compare::Lt => order == Some(Less),
        Compare::Le => matches!(order, Some(Less | Equal)),
        Compare::Gt => order == Some(Greater),
        Compare::Ge => matches!(order, Some(Greater | Equal)),
        Compare::Equ => matches!(order, None | Some(Equal)),
        Compare::Neu => order != Some(Equal),
        Compare::Ltu => matches!(order, None | Some(Less)),
        Compare::Leu => matches!(order, None | Some(Less | Equal)),
        Compare::Gtu => matches!(order, None | Some(Greater)),
        Compare::Geu => matches!(order, None | Some(Greater | Equal)),
        Compare::Num => order.is_some(),
        Compare::Nan => order.is_none(),
    }
}

pub fn combine(with: Option<Bool>, found: bool, other: bool) -> bool {
    match with {
        None => found,
        Some(Bool::And) => found && other,
        Some(Bool::Or) => found || other,
        Some(Bool::Xor) => found != other,
    }
}

/// A conversion of one value, or of two into a pair (`b` the lower); `None`: not between these types.
pub fn convert(to: Ty, from: Ty, round: Round, a: u64, b: Option<u64>) -> Option<u64> {
    let pair = |low: u64, high: u64, bits: u32| low | high << bits;
    Some(match (to, from, b) {
        (Ty::F16x2, Ty::F32, Some(b)) => pair(f16_of(f32_of(b)), f16_of(f32_of(a)), 16),
        (Ty::Bf16x2, Ty::F32, Some(b)) => pair(bf16_of(f32_of(b)), bf16_of(f32_of(a)), 16),
        (Ty::E4m3x2, Ty::F32, Some(b)) => pair(to_e4m3(f32_of(b)), to_e4m3(f32_of(a)), 8),
        (Ty::E4m3x2, Ty::F16x2, None) => pair(to_e4m3(f16_at(a)), to_e4m3(f16_at(a >> 16)), 8),
        (Ty::F16x2, Ty::E4m3x2, None) => pair(f16_of(e4m3(a as u8)), f16_of(e4m3((a >> 8) as u8)), 16),
        (Ty::F32, Ty::F16, None) => of_f32(f16_at(a)),
        (Ty::F32, Ty::Bf16, None) => of_f32(bf16::from_bits(a as u16).to_f32()),
        (Ty::F16, Ty::F32, None) => f16_of(f32_of(a)),
        (Ty::Bf16, Ty::F32, None) => bf16_of(f32_of(a)),
        (Ty::F32, Ty::F32, None) => of_f32(rounded(f32_of(a).into(), round) as f32),
        (Ty::F32, Ty::Bits(_) | Ty::Signed(_), None) => of_f32(from.extend(a) as f32),
        (Ty::Bits(_) | Ty::Signed(_), Ty::F32, None) => to_int(rounded(f32_of(a).into(), round), to),
        (Ty::Bits(_) | Ty::Signed(_), Ty::Bits(_) | Ty::Signed(_), None) => from.extend(a) as u64,
        _ => return None,
    })
}

fn f16_at(bits: u64) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

fn f16_of(x: f32) -> u64 {
    if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits().into() }
}

fn bf16_of(x: f32) -> u64 {
    if x.is_nan() { 0x7fff } else { bf16::from_f32(x).to_bits().into() }
}

fn rounded(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// The nearest integer of the type; 0 for NaN.
fn to_int(x: f64, ty: Ty) -> u64 {
    let bits = 8 * ty.bytes() as u32;
    let (low, high) = match ty {
        Ty::Signed(_) => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        _ => (0, (1i128 << bits) - 1),
    };
    (x as i128).clamp(low, high) as u64
}

/// The value of an E4M3 byte.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest E4M3, ties to even, the largest in place of what is larger.
pub fn to_e4m3(x: f32) -> u64 {
    let sign = u64::from(x.to_bits() >> 31) << 7;
    let magnitude = x.abs();
    if x.is_nan() {
        return 0x7f;
    }
    if magnitude >= 464.0 {
        return sign | 0x7e;
    }
    let exponent = if magnitude < f32::powi(2.0, -6) { -6 } else { (magnitude.to_bits() >> 23) as i32 - 127 };
    // In units of the last place, which carry into the exponent by themselves.
    let units = (f64::from(magnitude) * f64::powi(2.0, 3 - exponent)).round_ties_even() as u64;
    let bits = if exponent == -6 { units } else { ((exponent + 7) as u64) * 8 + units - 8 };
    sign | bits.min(0x7e)
}
