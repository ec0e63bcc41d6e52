//! The period of a sequence that nearly repeats: how long one round is, and where each ends.
//!
//! Must not know: what the signs mean.
//! Invariant: at most [`WINDOW`] signs are compared per candidate, whatever the length of the sequence.

use hashbrown::HashMap;

/// Signs that are compared with those one period later.
const WINDOW: usize = 1 << 15;
/// Periods that are tried, the most frequent distances first.
const CANDIDATES: usize = 48;
/// The share of signs that must return after one period.
const AGREE: f64 = 0.6;
/// A shorter period is preferred if it agrees as well as the best, but for this.
const CLOSE: f64 = 0.8;
/// The share of an anchor's distances that must be about one period. The layers of a network look alike
/// too, but between the last layer of one round and the first of the next lies the rest of the round.
const EVEN: f64 = 0.94;

/// A period, and where its rounds end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub period: usize,
    /// How many signs lie before the end of each round.
    pub ends: Vec<usize>,
}

/// Finds the period of `signs`; None if they do not repeat at least three times.
pub fn find(signs: &[u64]) -> Option<Found> {
    // The beginning (set-up, warm-up) does not repeat: look at the last two thirds.
    let late = &signs[signs.len() / 3..];
    let window = &late[..late.len().min(3 * WINDOW)];
    let (period, anchor) =
        autocorrelate(window).into_iter().find_map(|period| Some((period, anchor(late, period)?)))?;
    // A round ends where the anchor stands; rounds too short for the period are one round.
    let mut ends: Vec<usize> = Vec::new();
    for (at, sign) in signs.iter().enumerate() {
        if *sign == anchor && ends.last().is_none_or(|last| (at + 1 - last) * 2 > period) {
            ends.push(at + 1);
        }
    }
    (ends.len() >= 3).then_some(Found { period, ends })
}

/// The distances after which nearly as many signs return as after the best one, ascending.
fn autocorrelate(signs: &[u64]) -> Vec<usize> {
    let mut last: HashMap<u64, usize> = HashMap::new();
    let mut distances: HashMap<usize, usize> = HashMap::new();
    for (at, sign) in signs.iter().enumerate() {
        if let Some(before) = last.insert(*sign, at) {
            *distances.entry(at - before).or_default() += 1;
        }
    }
    let longest = signs.len() / 2;
    let mut candidates: Vec<(usize, usize)> = distances
        .into_iter()
        .filter(|(distance, _)| *distance >= 2 && *distance <= longest)
        .map(|(distance, times)| (times, distance))
        .collect();
    candidates.sort_unstable_by(|a, b| b.cmp(a));
    candidates.truncate(CANDIDATES);
    let agreement = |distance: usize| {
        let pairs = signs.len() - distance;
        let stride = pairs.div_ceil(WINDOW).max(1);
        let compared = (0..pairs).step_by(stride);
        let (count, same) = compared.fold((0usize, 0usize), |(n, same), at| {
            (n + 1, same + usize::from(signs[at] == signs[at + distance]))
        });
        same as f64 / count.max(1) as f64
    };
    let scored: Vec<(usize, f64)> =
        candidates.into_iter().map(|(_, distance)| (distance, agreement(distance))).collect();
    let best = scored.iter().map(|(_, score)| *score).fold(0.0, f64::max);
    let good = scored.iter().filter(|(_, score)| *score >= AGREE && *score >= CLOSE * best);
    let mut good: Vec<usize> = good.map(|(distance, _)| *distance).collect();
    good.sort_unstable();
    good
}

/// The sign that stands once in each round, at the most even distances; of equals the last in a round.
fn anchor(signs: &[u64], period: usize) -> Option<u64> {
    #[derive(Default)]
    struct Seen {
        last: usize,
        count: usize,
        even: usize,
        off: usize,
    }
    let mut seen: HashMap<u64, Seen> = HashMap::new();
    for (at, sign) in signs.iter().enumerate() {
        let entry = seen.entry(*sign).or_default();
        if entry.count > 0 {
            let distance = at - entry.last;
            entry.off += distance.abs_diff(period);
            entry.even += usize::from(distance * 2 > period && distance < period * 2);
        }
        entry.last = at;
        entry.count += 1;
    }
    let rounds = signs.len() / period;
    seen.into_iter()
        .filter(|(_, seen)| seen.count.abs_diff(rounds) * 4 <= rounds.max(4) && seen.count >= 2)
        .filter(|(_, seen)| seen.even as f64 >= EVEN * (seen.count - 1) as f64)
        .min_by_key(|(sign, seen)| (seen.off / seen.count, std::cmp::Reverse(seen.last), *sign))
        .map(|(sign, _)| sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_rounds_after_a_warm_up() {
        // Set-up, then rounds of 12 layers that look alike, an odd sign each seventh round, and a loss.
        let mut signs: Vec<u64> = (1000..1200).collect();
        let mut ends = Vec::new();
        for round in 0..40u64 {
            for _ in 0..12 {
                signs.extend([1, 2, 3, 4]);
            }
            if round % 7 == 0 {
                signs.push(99);
            }
            signs.push(5);
            for _ in 0..12 {
                signs.extend([6, 7]);
            }
            signs.push(8);
            ends.push(signs.len());
        }
        let found = find(&signs).unwrap();
        assert_eq!(found.period, 12 * 6 + 2);
        assert_eq!(found.ends.len(), 40);
    }

    #[test]
    fn noise_has_no_period() {
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 33
        };
        let signs: Vec<u64> = (0..10_000).map(|_| noise() % 50).collect();
        assert_eq!(find(&signs), None);
        assert_eq!(find(&[]), None);
        assert_eq!(find(&[1]), None);
        assert_eq!(find(&[1, 1, 1, 1]), None);
    }
}
