//! The size classes of small requests: eight per doubling, none wasting more than 12.5 %.
//!
//! Up to eight times the minimum the classes are multiples of the minimum (a request below the minimum
//! is rounded up to it, as in every allocator); above, each doubling is cut in eight. With the device's
//! minimum of 512 bytes every class up to 8 KiB is a multiple of 512, so that a block's size is exactly
//! what PyTorch's allocator would make it. It knows numbers only.

/// The largest request that a slab may serve; larger ones are fitted into free ranges. Bytes.
///
/// Fitted ranges waste less from here on: a slab per class would cost more memory than it saves, and the
/// time that a slab saves no longer matters for so few requests.
pub(super) const SLAB_MAX: u64 = 64 << 10;

/// The largest request for which a slab is made whenever there is none with a free slot. Bytes. Above, one is made
/// once [`LOOSE`] blocks of its class are *loose*: fitted into ranges for want of a slab, and not free again.
pub(super) const EAGER_MAX: u64 = 32 << 10;
pub(super) const LOOSE: u32 = 4;

/// Classes for one minimum block size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Classes {
    shift: u32,
}

impl Classes {
    /// `minimum` is a power of two of at most 1 KiB.
    pub(super) fn new(minimum: u64) -> Self {
        Classes { shift: minimum.trailing_zeros() }
    }

    pub(super) fn count(self) -> usize {
        self.index(SLAB_MAX) + 1
    }

    /// The class of a request of at most [`SLAB_MAX`] bytes.
    #[inline]
    pub(super) fn index(self, size: u64) -> usize {
        // The first eight classes are as far apart as the next eight: both are one case.
        let below = size.saturating_sub(1) >> self.shift;
        let doubling = (below | 8).ilog2() - 3;
        doubling as usize * 8 + (below >> doubling) as usize
    }

    /// The block size of a class, in bytes.
    #[inline]
    pub(super) fn size(self, index: usize) -> u64 {
        let index = index as u64;
        let units = if index < 8 { index + 1 } else { (9 + index % 8) << (index / 8 - 1) };
        units << self.shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_fits_its_class_and_no_smaller_one() {
        for minimum in [64, 128, 256, 512, 1024] {
            let classes = Classes::new(minimum);
            for size in 0..=SLAB_MAX {
                let index = classes.index(size);
                assert!(classes.size(index) >= size, "{size} in class {index} of {minimum}");
                if index > 0 {
                    assert!(classes.size(index - 1) < size, "{size} in class {index} of {minimum}");
                }
                assert!(index < classes.count() && classes.count() <= 64);
            }
        }
    }

    #[test]
    fn waste_is_at_most_an_eighth() {
        for minimum in [64, 512] {
            let classes = Classes::new(minimum);
            for size in 8 * minimum..=SLAB_MAX {
                let block = classes.size(classes.index(size));
                assert!((block - size) * 8 <= block, "{size} wastes {} of {block}", block - size);
            }
        }
    }

    #[test]
    fn device_classes_are_what_pytorch_rounds_to() {
        let classes = Classes::new(512);
        for size in 1..=8 << 10 {
            assert_eq!(classes.size(classes.index(size)), size.next_multiple_of(512));
        }
    }
}
