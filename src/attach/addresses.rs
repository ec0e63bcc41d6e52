//! A set of addresses, each with its number in their order: bitmaps of small pages of the address space, found by a
//! table. Most addresses that are looked up are not in it: that takes a word of the table and one of a bitmap.
//!
//! Must not know what lies at the addresses. Invariants: exact for any address; an allocation that fails is no set;
//! a set takes at most 96 MiB and its table.

/// Of an address: the place in its page.
const PAGE_BITS: u32 = 17;
/// Most words of bitmaps: those of pages that take up 8 GiB, where the addresses are multiples of 16.
const MOST_WORDS: usize = 1 << 23;
/// Objects are aligned to 8 bytes at least, and most of them to 16: the bits that tell nothing.
const UNIT_BITS: std::ops::RangeInclusive<u32> = 3..=4;
const EMPTY: Page = Page { key: usize::MAX, words: 0 };

#[derive(Clone, Copy)]
struct Page {
    /// The addresses of the page, without the bits of the place; no address has a page of the key of `EMPTY`.
    key: usize,
    /// Where its bitmap begins in `words`.
    words: u32,
}

pub(super) struct Addresses {
    /// The pages by their hash; a power of two, at most half of them taken.
    table: Vec<Page>,
    /// What is left of a hash's bits when `table` is indexed.
    hash_shift: u32,
    /// All addresses are multiples of 1 << this.
    unit_bits: u32,
    words: Vec<u64>,
    /// How many addresses there are before those of each word.
    before: Vec<u32>,
    count: u32,
}

impl Addresses {
    /// None where there is no memory for it, the addresses lie in too many pages, or are not aligned.
    pub(super) fn new(addresses: impl Iterator<Item = usize> + Clone) -> Option<Addresses> {
        let bits = addresses.clone().fold(0, |bits, address| bits | address);
        let unit_bits = bits.trailing_zeros().min(*UNIT_BITS.end());
        if unit_bits < *UNIT_BITS.start() {
            return None;
        }
        let mut set = Addresses {
            table: Vec::new(),
            hash_shift: 0,
            unit_bits,
            words: Vec::new(),
            before: Vec::new(),
            count: 0,
        };
        set.resize(256)?;
        let in_page = set.words_in_page();
        let mut pages = Vec::<usize>::new();
        let mut last = EMPTY;
        for address in addresses {
            let key = address >> PAGE_BITS;
            if key != last.key {
                let mut slot = set.slot(key);
                if set.table[slot].key != key {
                    if 2 * (pages.len() + 1) > set.table.len() {
                        set.resize(4 * set.table.len())?;
                        for (number, &key) in pages.iter().enumerate() {
                            let at = set.slot(key);
                            set.table[at] = Page { key, words: (number * in_page) as u32 };
                        }
                        slot = set.slot(key);
                    }
                    set.table[slot] = Page { key, words: (pages.len() * in_page) as u32 };
                    if (pages.len() + 1) * in_page > MOST_WORDS {
                        return None;
                    }
                    pages.try_reserve(1).ok()?;
                    pages.push(key);
                    set.words.try_reserve(in_page).ok()?;
                    set.words.resize(pages.len() * in_page, 0);
                }
                last = set.table[slot];
            }
            let unit = set.unit(address);
            set.words[last.words as usize + unit / 64] |= 1 << (unit % 64);
        }
        set.before.try_reserve_exact(set.words.len()).ok()?;
        for word in &set.words {
            set.before.push(set.count);
            set.count += word.count_ones();
        }
        Some(set)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.count as usize
    }

    /// The number of an address; none if it is not in the set. Numbers are dense, in no order that means anything.
    pub(super) fn number(&self, address: usize) -> Option<u32> {
        let (number, is_in) = self.look(address);
        is_in.then_some(number)
    }

    /// The number of an address and whether it is in the set; if not, the number is any that some address has, or
    /// 0. Without a branch on that, which nothing could foretell where many are looked up.
    #[inline(always)]
    pub(super) fn look(&self, address: usize) -> (u32, bool) {
        let page = self.table[self.slot(address >> PAGE_BITS)];
        let unit = self.unit(address);
        // An empty place's page begins at the first word, and is not that of the address.
        let at = page.words as usize + unit / 64;
        let (Some(&word), Some(&before)) = (self.words.get(at), self.before.get(at)) else {
            return (0, false);
        };
        let bit = 1 << (unit % 64);
        let is_in = (word & bit != 0)
            & (page.key == address >> PAGE_BITS)
            & (address & ((1 << self.unit_bits) - 1) == 0);
        let number = before + (word & (bit - 1)).count_ones();
        (number, is_in)
    }

    fn words_in_page(&self) -> usize {
        1 << (PAGE_BITS - self.unit_bits - 6)
    }

    #[inline(always)]
    fn unit(&self, address: usize) -> usize {
        (address & ((1 << PAGE_BITS) - 1)) >> self.unit_bits
    }

    /// Where a page stands in the table, or would.
    #[inline(always)]
    fn slot(&self, key: usize) -> usize {
        let mut at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.hash_shift) & (self.table.len() - 1);
        while self.table[at].key != key && self.table[at].key != EMPTY.key {
            at = (at + 1) & (self.table.len() - 1);
        }
        at
    }

    /// Empties the table, and gives it so many places.
    fn resize(&mut self, places: usize) -> Option<()> {
        self.table.clear();
        self.table.try_reserve_exact(places).ok()?;
        self.table.resize(places, EMPTY);
        self.hash_shift = usize::BITS - places.trailing_zeros();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether exactly these have numbers, each one of its own.
    fn check(addresses: &[usize]) {
        let set = Addresses::new(addresses.iter().copied()).unwrap();
        let mut sorted = addresses.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(set.len(), sorted.len());
        let mut numbers: Vec<u32> = sorted.iter().map(|&address| set.number(address).unwrap()).collect();
        numbers.sort_unstable();
        assert!(numbers.iter().copied().eq(0..sorted.len() as u32));
        for &address in addresses {
            for near in (1..=64).flat_map(|by| [address.wrapping_add(by), address.wrapping_sub(by)]) {
                assert_eq!(set.number(near).is_some(), sorted.binary_search(&near).is_ok(), "{near:x}");
            }
        }
        for far in [0, 8, 1 << 46, usize::MAX, usize::MAX - 15] {
            assert_eq!(set.number(far).is_some(), sorted.binary_search(&far).is_ok(), "{far:x}");
        }
    }

    #[test]
    fn each_address_has_a_number_and_no_other_one_has() {
        check(&[]);
        check(&[0x7f00_1234_5670]);
        check(&[16, 32, 48, 32, 1 << 40, (1 << 40) + 16]);
        check(&[0x5555_0000_0ff0, 0x5555_0000_1000, (1 << PAGE_BITS) - 16, 1 << PAGE_BITS]);
    }

    #[test]
    fn they_may_stand_at_every_eighth_place() {
        check(&[8, 24, 32, 0x7f00_0000_0008]);
        check(&[0, usize::MAX - 7, usize::MAX - 15]);
        for odd in [1, 2, 4, 12, 0x7f00_0000_0004] {
            assert!(Addresses::new([16, odd].into_iter()).is_none());
        }
    }

    #[test]
    fn many_pages_are_found() {
        check(&(1..5000).map(|n| (n << PAGE_BITS) + 16 * (n % 7000)).collect::<Vec<_>>());
        check(&(1..5000).map(|n| n * 48 + 0x7f11_0000_0000).collect::<Vec<_>>());
        check(
            &(1..3000)
                .map(|n: usize| (n.wrapping_mul(0x1234_5678_9abc_def1) >> 17) & !15)
                .collect::<Vec<_>>(),
        );
    }

    #[test]
    fn too_many_pages_are_no_set() {
        let pages = MOST_WORDS >> (PAGE_BITS - 4 - 6);
        assert!(Addresses::new((0..=pages).map(|n| n << PAGE_BITS)).is_none());
        assert!(Addresses::new((0..pages).map(|n| n << PAGE_BITS)).is_some());
    }
}
