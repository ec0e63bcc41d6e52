//! A thinned series: values at step boundaries, bounded however long the job runs.
//!
//! Must not know: what the values mean.
//! Invariant: at most `N` points, steps rising, the first point is never forgotten, and the spacing is
//! even up to a factor of two.

/// Points `(step, value)`; when full, every second one is dropped and the stride doubles.
#[derive(Clone, Debug)]
pub struct Thinned<T, const N: usize> {
    points: Vec<(u32, T)>,
    stride: u32,
}

impl<T, const N: usize> Default for Thinned<T, N> {
    fn default() -> Self {
        Thinned { points: Vec::new(), stride: 1 }
    }
}

impl<T: Copy, const N: usize> Thinned<T, N> {
    /// Notes `value` at `step`, unless the last point is nearer than the stride.
    pub fn push(&mut self, step: u32, value: T) {
        if self.points.last().is_some_and(|last| step < last.0.saturating_add(self.stride)) {
            return;
        }
        if self.points.len() == N {
            let mut at = 0;
            self.points.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.stride = self.stride.saturating_mul(2);
            return self.push(step, value);
        }
        if self.points.len() == self.points.capacity() {
            let more = if self.points.is_empty() { 2 } else { self.points.len() };
            self.points.reserve_exact(more.min(N - self.points.len()));
        }
        self.points.push((step, value));
    }

    /// Like [`push`](Self::push), but nothing is lost without a trace: a value that is not kept is merged into
    /// the point before it.
    pub fn push_merging(&mut self, step: u32, value: T, merge: impl Fn(&mut T, &T)) {
        if let Some(last) = self.points.last_mut().filter(|last| step < last.0.saturating_add(self.stride)) {
            return merge(&mut last.1, &value);
        }
        if self.points.len() == N {
            for pair in self.points.chunks_exact_mut(2) {
                let dropped = pair[1].1;
                merge(&mut pair[0].1, &dropped);
            }
            let mut at = 0;
            self.points.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.stride = self.stride.saturating_mul(2);
            return self.push_merging(step, value, merge);
        }
        self.push(step, value);
    }

    pub fn points(&self) -> &[(u32, T)] {
        &self.points
    }

    /// The newest point not after `step`.
    pub fn at(&self, step: u32) -> Option<&(u32, T)> {
        self.points.iter().rev().find(|point| point.0 <= step)
    }

    pub fn memory_bytes(&self) -> usize {
        self.points.capacity() * size_of::<(u32, T)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_bounded_and_remembers_the_start() {
        let mut series: Thinned<u64, 16> = Thinned::default();
        for step in 0..1_000_000 {
            series.push(step, u64::from(step));
        }
        let points = series.points();
        assert!(points.len() <= 16 && points.len() >= 8);
        assert_eq!(points[0], (0, 0));
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(1_000_000 - points.last().unwrap().0 <= 2 * 1_000_000 / 8);
        assert_eq!(series.at(points[3].0 + 1), Some(&points[3]));
        assert!(series.memory_bytes() <= 16 * 16);
    }

    #[test]
    fn a_peak_between_points_is_not_lost() {
        let mut series: Thinned<u64, 16> = Thinned::default();
        for step in 0..10_000 {
            series
                .push_merging(step, u64::from(step == 4_321), |kept, dropped| *kept = (*kept).max(*dropped));
        }
        assert!(series.points().len() <= 16);
        let (before, after) =
            (series.at(4_321).unwrap(), series.points().iter().find(|p| p.0 > 4_321).unwrap());
        assert_eq!((before.1, after.1), (1, 0));
    }
}
