//! Numbers as people read them: bytes, counts, durations.
//!
//! Must not know: what is counted.
//! Invariant: at most four significant characters and a unit.

/// "4.0 MiB"; whole bytes below 1 KiB.
pub fn bytes(value: f64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if value.abs() < 1024.0 {
        return format!("{value:.0} B");
    }
    let (mut value, mut unit) = (value / 1024.0, units[0]);
    for next in &units[1..] {
        if value.abs() < 1023.95 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    format!("{value:.1} {unit}")
}

/// "31k", "4.2M"; exact below 10,000.
pub fn count(value: u64) -> String {
    match value {
        0..10_000 => value.to_string(),
        10_000..999_500 => format!("{:.0}k", value as f64 / 1e3),
        999_500..999_950_000 => format!("{:.1}M", value as f64 / 1e6),
        _ => format!("{:.1}G", value as f64 / 1e9),
    }
}

/// "2 h 10 min", "45 s".
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..100 => format!("{whole} s"),
        100..6_000 => format!("{} min", (whole + 30) / 60),
        6_000..172_800 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} days", whole / 86_400),
    }
}

/// "1 step", "2 steps".
pub fn plural(count: u64, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{} {one}s", self::count(count)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_well() {
        assert_eq!(bytes(512.0), "512 B");
        assert_eq!(bytes(4.0 * 1048576.0), "4.0 MiB");
        assert_eq!(bytes(1048575.0), "1.0 MiB");
        assert_eq!(bytes(2.0 * 1048576.0 * 1048576.0), "2.0 TiB");
        assert_eq!(count(31_200), "31k");
        assert_eq!(count(4_200_000), "4.2M");
        assert_eq!(duration(7_800.0), "2 h 10 min");
        assert_eq!(duration(45.2), "45 s");
        assert_eq!(plural(1, "step"), "1 step");
    }
}
