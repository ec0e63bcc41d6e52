//! Robust statistics of short series: Theil–Sen slope, Mann–Kendall trend, regularity of gaps, Laplace's
//! test for a rate that falls.
//!
//! Must not know: sites, steps, judgement.
//! Invariant: pure functions; no allocation beyond what their short input needs.

/// The median of all pairwise slopes; None below two distinct abscissae.
pub fn theil_sen(points: &[(f64, f64)]) -> Option<f64> {
    let mut slopes = Vec::with_capacity(points.len() * points.len() / 2);
    for (at, a) in points.iter().enumerate() {
        for b in &points[at + 1..] {
            if b.0 != a.0 {
                slopes.push((b.1 - a.1) / (b.0 - a.0));
            }
        }
    }
    median(&mut slopes)
}

/// Kendall's tau between time and value (ties count as neither) and the Mann–Kendall z.
pub fn mann_kendall(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mut score = 0i64;
    for (at, a) in values.iter().enumerate() {
        for b in &values[at + 1..] {
            score += i64::from(b > a) - i64::from(b < a);
        }
    }
    if values.len() < 2 {
        return (0.0, 0.0);
    }
    let variance = n * (n - 1.0) * (2.0 * n + 5.0) / 18.0;
    let z = (score - score.signum()) as f64 / variance.sqrt();
    (score as f64 / (n * (n - 1.0) / 2.0), z)
}

pub fn median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let middle = values.len() / 2;
    let upper = *values.select_nth_unstable_by(middle, f64::total_cmp).1;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = values[..middle].iter().copied().max_by(f64::total_cmp)?;
    Some((lower + upper) / 2.0)
}

/// Mean and coefficient of variation.
pub fn mean_and_cv(values: &[f64]) -> Option<(f64, f64)> {
    if values.is_empty() {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
    Some((mean, if mean == 0.0 { 0.0 } else { variance.sqrt() / mean }))
}

/// Laplace's test: whether events in `(from, to]` thin out (strongly negative) or hold their rate (about 0). Each is
/// a moment and how many events it stands for.
pub fn laplace(events: &[(f64, f64)], from: f64, to: f64) -> f64 {
    let length = (to - from).max(1e-9);
    let sum: f64 = events.iter().map(|(at, times)| times * (at - from) / length).sum();
    let n: f64 = events.iter().map(|event| event.1).sum();
    if n == 0.0 { 0.0 } else { (sum / n - 0.5) * (12.0_f64 * n).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slope_ignores_outliers() {
        let points: Vec<(f64, f64)> = (0..20)
            .map(|x| (f64::from(x), f64::from(x) * 3.0 + if x % 7 == 0 { 500.0 } else { 0.0 }))
            .collect();
        assert!((theil_sen(&points).unwrap() - 3.0).abs() < 0.5);
        assert_eq!(theil_sen(&[(1.0, 2.0)]), None);
    }

    #[test]
    fn trend_of_a_line_and_of_a_plateau() {
        let line: Vec<f64> = (0..12).map(f64::from).collect();
        let (tau, z) = mann_kendall(&line);
        assert!(tau > 0.99 && z > 4.0);
        assert_eq!(mann_kendall(&[5.0; 12]).0, 0.0);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&mut []), None);
    }

    #[test]
    fn laplace_sees_thinning() {
        let doubling: Vec<(f64, f64)> = (0..8).map(|k| (2f64.powi(k), 1.0)).collect();
        assert!(laplace(&doubling, 0.0, 256.0) < -1.7);
        let even: Vec<(f64, f64)> = (1..=10).map(|k| (f64::from(k) * 10.0, 1.0)).collect();
        assert!(laplace(&even, 0.0, 100.0).abs() < 1.0);
    }
}
