//! The raw form of a stack: what a walk leaves behind and what the hot path hashes and compares.
//!
//! Must not know where frames come from or what they mean; that is `python`, `native` and `tree`.
//! Invariant: two raw frames are equal exactly when they are the same place in the same code, so
//! equality of raw stacks needs no second look.

/// One frame: 16 bytes, so that a stack of 20 is five cache lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RawFrame {
    /// Address of the code object (Python) or of the instruction (native).
    pub place: u64,
    /// Python: fingerprint (31 bits) above the instruction's byte offset (32 bits). Else a tag below.
    rest: u64,
}

const NATIVE: u64 = u64::MAX;
const CUT: u64 = u64::MAX - 1;

impl RawFrame {
    /// A place in a code object. `print` tells apart code objects that were given the same address.
    #[inline(always)]
    pub fn python(code: u64, offset: i32, print: u32) -> RawFrame {
        RawFrame { place: code, rest: (u64::from(print & 0x7fff_ffff) << 32) | u64::from(offset as u32) }
    }

    /// A return address.
    #[inline(always)]
    pub fn native(address: u64) -> RawFrame {
        RawFrame { place: address, rest: NATIVE }
    }

    /// Stands for the outer frames that were not kept.
    pub fn cut() -> RawFrame {
        RawFrame { place: 0, rest: CUT }
    }

    pub fn is_native(self) -> bool {
        self.rest == NATIVE
    }

    pub fn is_cut(self) -> bool {
        self.rest == CUT
    }

    /// Byte offset of the instruction within the code object's bytecode; negative before the first one.
    pub fn offset(self) -> i32 {
        self.rest as u32 as i32
    }

    /// A well-mixed word for this frame. Independent of its neighbours, so that the processor overlaps
    /// the multiplications of a whole stack.
    #[inline(always)]
    pub fn mix(self) -> u64 {
        let wide = u128::from(self.place ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(self.rest.rotate_left(29) ^ 0xc2b2_ae3d_27d4_eb4f);
        (wide as u64) ^ ((wide >> 64) as u64)
    }
}

/// Adds a frame's word to the hash of the frames inside it; order matters.
#[inline(always)]
pub fn fold(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25)
}

/// The hash of a whole stack; a walk may compute the same by [`fold`]ing as it goes.
pub fn hash(frames: &[RawFrame]) -> u64 {
    frames.iter().fold(0, |hash, frame| fold(hash, frame.mix()))
}

/// Equality without an early exit: stacks whose hashes agree are almost always equal, and a loop
/// without branches is the faster one then.
#[inline(always)]
pub fn same(a: &[RawFrame], b: &[RawFrame]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).fold(0, |odd, (a, b)| odd | (a.place ^ b.place) | (a.rest ^ b.rest)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tags_are_no_python_frame() {
        let frame = RawFrame::python(0x1000, -1, u32::MAX);
        assert!(!frame.is_native() && !frame.is_cut());
        assert_eq!(frame.offset(), -1);
        assert!(RawFrame::native(5).is_native());
        assert!(RawFrame::cut().is_cut());
    }

    #[test]
    fn order_and_every_field_change_the_hash() {
        let a = RawFrame::python(0x7f00_1000, 24, 7);
        let b = RawFrame::python(0x7f00_2000, 24, 7);
        let all = [
            hash(&[a, b]),
            hash(&[b, a]),
            hash(&[a]),
            hash(&[RawFrame::python(0x7f00_1000, 26, 7)]),
            hash(&[RawFrame::python(0x7f00_1000, 24, 8)]),
            hash(&[RawFrame::native(0x7f00_1000)]),
        ];
        for (i, x) in all.iter().enumerate() {
            assert!(all.iter().skip(i + 1).all(|y| x != y));
        }
        assert!(same(&[a, b], &[a, b]) && !same(&[a, b], &[b, a]) && !same(&[a], &[a, b]));
    }
}
