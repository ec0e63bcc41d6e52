//! The tag that a live block carries: 16 bytes that name its site, serial number and generation.
//!
//! Must not know: what a site is.
//! Invariant: packing loses nothing within the field widths (site 32, step 32, serial 38, phase 6, epoch 20
//! bits); the serial number wraps.

use super::clock::{EPOCH_BITS, Now, PHASE_BITS, Phase};

const SERIAL: u32 = EPOCH_BITS + PHASE_BITS;

/// Site and step in the first word, serial number, phase and epoch in the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64, pub u64);

impl Tag {
    #[inline]
    pub const fn new(site: u32, serial: u64, now: Now) -> Tag {
        Tag(
            (site as u64) << 32 | now.step as u64,
            serial << SERIAL | (now.phase.number() as u64) << EPOCH_BITS | (now.epoch as u64 & 0xf_ffff),
        )
    }

    /// The site's index in its device's accounts.
    #[inline]
    pub const fn site(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The step in which the block was born.
    #[inline]
    pub const fn step(self) -> u32 {
        self.0 as u32
    }

    /// Counts the births of one device, modulo 2^38.
    #[inline]
    pub const fn serial(self) -> u64 {
        self.1 >> SERIAL
    }

    #[inline]
    pub const fn epoch(self) -> u32 {
        self.1 as u32 & 0xf_ffff
    }

    #[inline]
    pub const fn phase(self) -> Phase {
        match Phase::from_number((self.1 >> EPOCH_BITS) as u32 & ((1 << PHASE_BITS) - 1)) {
            Some(phase) => phase,
            None => Phase::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_every_field() {
        let now = Now { step: u32::MAX, epoch: 0xf_ffff, phase: Phase::Validation, ..Now::default() };
        let tag = Tag::new(7, (1 << 38) - 1, now);
        assert_eq!((tag.site(), tag.step(), tag.serial()), (7, u32::MAX, (1 << 38) - 1));
        assert_eq!((tag.epoch(), tag.phase()), (0xf_ffff, Phase::Validation));
        assert_eq!(Tag::new(1, 1 << 38, Now::default()).serial(), 0);
    }
}
