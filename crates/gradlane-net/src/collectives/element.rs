//! Elements of collectives, and how two of them become one.

use half::{bf16, f16};

/// Type of the elements that a collective moves or reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Element {
    /// Bytes of any meaning, which are moved and never reduced.
    Bytes = 0,
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary64.
    F64 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// The upper half of binary32.
    Bf16 = 4,
    /// Signed, 8 bits.
    I8 = 5,
    /// Signed, 16 bits.
    I16 = 6,
    /// Signed, 32 bits.
    I32 = 7,
    /// Signed, 64 bits.
    I64 = 8,
    /// Unsigned, 8 bits.
    U8 = 9,
    /// One byte, 0 or 1.
    Bool = 10,
}

const ELEMENTS: [Element; 11] = [
    Element::Bytes,
    Element::F32,
    Element::F64,
    Element::F16,
    Element::Bf16,
    Element::I8,
    Element::I16,
    Element::I32,
    Element::I64,
    Element::U8,
    Element::Bool,
];

impl Element {
    /// The name in messages and calls.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Element::Bytes => "bytes",
            Element::F32 => "f32",
            Element::F64 => "f64",
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::I8 => "i8",
            Element::I16 => "i16",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::U8 => "u8",
            Element::Bool => "bool",
        }
    }

    /// Returns the type with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Element> {
        ELEMENTS.into_iter().find(|it| it.name() == name)
    }

    /// Returns the type with a code on the wire.
    pub(super) fn from_code(code: u32) -> Option<Element> {
        ELEMENTS.into_iter().find(|it| *it as u32 == code)
    }

    /// Size of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Element::Bytes | Element::I8 | Element::U8 | Element::Bool => 1,
            Element::F16 | Element::Bf16 | Element::I16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::F64 | Element::I64 => 8,
        }
    }

    const fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F64 | Element::F16 | Element::Bf16)
    }
}

/// How contributions become one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reduction {
    /// The sum; of integers, modulo their size; of bools, whether any is true.
    Sum = 0,
    /// The sum divided by the number of ranks.
    Mean = 1,
    /// The product; of bools, whether all are true.
    Product = 2,
    /// The smallest value; NaN where there is one.
    Min = 3,
    /// The largest value; NaN where there is one.
    Max = 4,
    /// Bitwise and.
    And = 5,
    /// Bitwise or.
    Or = 6,
    /// Bitwise exclusive or.
    Xor = 7,
}

const REDUCTIONS: [Reduction; 8] = [
    Reduction::Sum,
    Reduction::Mean,
    Reduction::Product,
    Reduction::Min,
    Reduction::Max,
    Reduction::And,
    Reduction::Or,
    Reduction::Xor,
];

impl Reduction {
    /// The name in messages and calls.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Product => "product",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::And => "and",
            Reduction::Or => "or",
            Reduction::Xor => "xor",
        }
    }

    /// Returns the reduction with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Reduction> {
        REDUCTIONS.into_iter().find(|it| it.name() == name)
    }

    /// Returns the reduction with a code on the wire.
    pub(super) fn from_code(code: u32) -> Option<Reduction> {
        REDUCTIONS.into_iter().find(|it| *it as u32 == code)
    }

    /// Returns whether elements of a type can be reduced so.
    #[must_use]
    pub fn takes(self, element: Element) -> bool {
        match (self, element) {
            (_, Element::Bytes) => false,
            (Reduction::Mean, _) => element.is_float(),
            (Reduction::And | Reduction::Or | Reduction::Xor, _) => !element.is_float(),
            _ => true,
        }
    }
}

/// Bytes that are reduced at a time: they stay in the processor's first cache.
pub(super) const PIECE_BYTES: usize = 8 << 10;

/// Reduces `from` into `into`, element by element: `into` is the earlier operand.
///
/// # Panics
/// When the elements cannot be reduced so, which the calls of a group refuse.
pub(super) fn combine(element: Element, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    use Reduction::{And, Max, Mean, Min, Or, Product, Sum, Xor};
    macro_rules! each {
        ($type:ty, $operation:expr) => {
            each(into, from, |a, b| {
                let operation = $operation;
                operation(<$type>::from_ne_bytes(a), <$type>::from_ne_bytes(b)).to_ne_bytes()
            })
        };
    }
    macro_rules! integers {
        ($type:ty) => {
            match reduction {
                Sum => each!($type, |a: $type, b: $type| a.wrapping_add(b)),
                Product => each!($type, |a: $type, b: $type| a.wrapping_mul(b)),
                Min => each!($type, |a: $type, b: $type| a.min(b)),
                Max => each!($type, |a: $type, b: $type| a.max(b)),
                And => each!($type, |a: $type, b: $type| a & b),
                Or => each!($type, |a: $type, b: $type| a | b),
                Xor => each!($type, |a: $type, b: $type| a ^ b),
                Mean => unreachable!("a mean of integers"),
            }
        };
    }
    macro_rules! floats {
        ($type:ty) => {
            match reduction {
                Sum | Mean => each!($type, |a: $type, b: $type| a + b),
                Product => each!($type, |a: $type, b: $type| a * b),
                Min => each!($type, |a: $type, b: $type| if a < b || a.is_nan() { a } else { b }),
                Max => each!($type, |a: $type, b: $type| if a > b || a.is_nan() { a } else { b }),
                And | Or | Xor => unreachable!("bits of floats"),
            }
        };
    }
    macro_rules! halves {
        ($type:ty) => {{
            macro_rules! as_f32 {
                ($operation:expr) => {
                    each!($type, |a: $type, b: $type| {
                        <$type>::from_f32($operation(a.to_f32(), b.to_f32()))
                    })
                };
            }
            match reduction {
                Sum | Mean => as_f32!(|a: f32, b: f32| a + b),
                Product => as_f32!(|a: f32, b: f32| a * b),
                Min => as_f32!(|a: f32, b: f32| if a < b || a.is_nan() { a } else { b }),
                Max => as_f32!(|a: f32, b: f32| if a > b || a.is_nan() { a } else { b }),
                And | Or | Xor => unreachable!("bits of floats"),
            }
        }};
    }
    match element {
        Element::F32 => floats!(f32),
        Element::F64 => floats!(f64),
        Element::F16 => halves!(f16),
        Element::Bf16 => halves!(bf16),
        Element::I8 => integers!(i8),
        Element::I16 => integers!(i16),
        Element::I32 => integers!(i32),
        Element::I64 => integers!(i64),
        Element::U8 => integers!(u8),
        Element::Bool => match reduction {
            Sum | Max | Or => each!(u8, |a: u8, b: u8| u8::from(a | b != 0)),
            Product | Min | And => each!(u8, |a: u8, b: u8| u8::from(a != 0 && b != 0)),
            Xor => each!(u8, |a: u8, b: u8| u8::from((a != 0) != (b != 0))),
            Mean => unreachable!("a mean of bools"),
        },
        Element::Bytes => unreachable!("bytes are moved"),
    }
}

/// Divides floats by the number of ranks.
pub(super) fn divide(element: Element, values: &mut [u8], ranks: u32) {
    fn map<const SIZE: usize>(values: &mut [u8], operation: impl Fn([u8; SIZE]) -> [u8; SIZE]) {
        for value in values.as_chunks_mut::<SIZE>().0 {
            *value = operation(*value);
        }
    }
    let (single, double) = (ranks as f32, f64::from(ranks));
    match element {
        Element::F32 => map(values, |it| (f32::from_ne_bytes(it) / single).to_ne_bytes()),
        Element::F64 => map(values, |it| (f64::from_ne_bytes(it) / double).to_ne_bytes()),
        Element::F16 => {
            map(values, |it| f16::from_f32(f16::from_ne_bytes(it).to_f32() / single).to_ne_bytes());
        }
        Element::Bf16 => map(values, |it| {
            bf16::from_f32(bf16::from_ne_bytes(it).to_f32() / single).to_ne_bytes()
        }),
        _ => unreachable!("a mean of {}", element.name()),
    }
}

/// Applies an operation, which becomes a loop of its own: a call an element would take longer than all else.
#[inline(always)]
fn each<const SIZE: usize>(
    into: &mut [u8],
    from: &[u8],
    operation: impl Fn([u8; SIZE], [u8; SIZE]) -> [u8; SIZE],
) {
    let pairs = into.as_chunks_mut::<SIZE>().0.iter_mut().zip(from.as_chunks::<SIZE>().0);
    for (into, from) in pairs {
        *into = operation(*into, *from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combined<const SIZE: usize>(
        element: Element,
        reduction: Reduction,
        pair: [[u8; SIZE]; 2],
    ) -> [u8; SIZE] {
        let [mut into, from] = pair;
        combine(element, reduction, &mut into, &from);
        into
    }

    #[test]
    fn each_type_and_reduction_gives_the_value_of_its_definition() {
        let f32s = |a: f32, b: f32| [a.to_ne_bytes(), b.to_ne_bytes()];
        let value =
            |reduction, a, b| f32::from_ne_bytes(combined(Element::F32, reduction, f32s(a, b)));
        assert_eq!(value(Reduction::Sum, 1.5, 2.0), 3.5);
        assert_eq!(value(Reduction::Product, 1.5, 2.0), 3.0);
        assert_eq!(value(Reduction::Min, 1.5, 2.0), 1.5);
        assert_eq!(value(Reduction::Max, 1.5, 2.0), 2.0);
        assert!(value(Reduction::Max, f32::NAN, 2.0).is_nan());
        assert!(value(Reduction::Min, 2.0, f32::NAN).is_nan());
        let i8s = |reduction, a: i8, b: i8| {
            combined(Element::I8, reduction, [a.to_ne_bytes(), b.to_ne_bytes()])[0] as i8
        };
        assert_eq!(i8s(Reduction::Sum, 100, 100), -56, "modulo 256");
        assert_eq!(i8s(Reduction::Xor, 6, 3), 5);
        assert_eq!(combined(Element::Bool, Reduction::Sum, [[1], [1]]), [1]);
        assert_eq!(combined(Element::Bool, Reduction::Product, [[1], [0]]), [0]);
        let halves = [f16::from_f32(2048.0).to_ne_bytes(), f16::from_f32(1.0).to_ne_bytes()];
        let sum = combined(Element::F16, Reduction::Sum, halves);
        assert_eq!(f16::from_ne_bytes(sum).to_f32(), 2048.0, "rounded to even");
    }

    #[test]
    fn names_and_codes_lead_back() {
        for element in ELEMENTS {
            assert_eq!(Element::from_name(element.name()), Some(element));
            assert_eq!(Element::from_code(element as u32), Some(element));
        }
        for reduction in REDUCTIONS {
            assert_eq!(Reduction::from_name(reduction.name()), Some(reduction));
            assert_eq!(Reduction::from_code(reduction as u32), Some(reduction));
            assert!(!reduction.takes(Element::Bytes));
        }
    }
}
