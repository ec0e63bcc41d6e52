//! What `strandline check` is told: sizes, rates, budgets and suppressions, and what they match.
//!
//! Must not know: reports as a whole, how results are shown.

use std::path::Path;
use strandline::ledger::Frame;
use strandline::report::model::Finding;
use strandline::report::units;

/// The most that may accumulate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    pub bytes: f64,
    pub per_epoch: bool,
}

impl std::fmt::Display for Growth {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}/{}", units::bytes(self.bytes), if self.per_epoch { "epoch" } else { "step" })
    }
}

/// "0 B/step", "1.5MiB/epoch".
pub fn growth(text: &str) -> Result<Growth, String> {
    let (bytes, per) =
        text.split_once('/').ok_or("say per what, for example \"0 B/step\" or \"1 MiB/epoch\"")?;
    let per_epoch = match per.trim() {
        "step" | "iteration" => false,
        "epoch" => true,
        other => return Err(format!("{other:?} is neither step nor epoch")),
    };
    Ok(Growth { bytes: size(bytes)?, per_epoch })
}

/// "512 MiB", "80GiB", "0". Bytes.
pub fn size(text: &str) -> Result<f64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no size; say for example 512MiB"))?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1_048_576.0,
        "g" | "gib" => 1_073_741_824.0,
        "t" | "tib" => 1_099_511_627_776.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => return Err(format!("{other:?} is no unit; B, KiB, MiB, GiB and TiB are")),
    };
    Ok(number * factor)
}

/// The most live bytes of the sites that a pattern matches.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    pub site: String,
    pub bytes: f64,
}

/// "model.py=2GiB", "train.py:42=0", "*attention*=512MiB".
pub fn budget(text: &str) -> Result<Budget, String> {
    let (site, bytes) = text.rsplit_once('=').ok_or("say SITE=BYTES, for example model.py:17=512MiB")?;
    let site = site.trim();
    if site.is_empty() {
        return Err("the site is empty; * matches every site".to_owned());
    }
    Ok(Budget { site: site.to_owned(), bytes: size(bytes)? })
}

/// One line of a suppression file.
#[derive(Clone, Debug)]
pub struct Suppression {
    pub pattern: String,
    /// Findings that it silenced.
    pub used: usize,
}

/// Reads a file in LeakSanitizer's format: `leak:PATTERN`, comments with `#`.
pub fn suppressions(path: &Path) -> Result<Vec<Suppression>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|e| format!("--suppressions {}: {e}", path.display()))?;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match line.split_once(':') {
            Some(("leak", pattern)) if !pattern.trim().is_empty() => {
                found.push(Suppression { pattern: pattern.trim().to_owned(), used: 0 });
            }
            _ => {
                return Err(format!(
                    "--suppressions {}:{}: {line:?} is not leak:PATTERN (the format of LeakSanitizer)",
                    path.display(),
                    number + 1
                ));
            }
        }
    }
    Ok(found)
}

/// The rule of the sanitizers: a pattern is a part of the text; `*` stands for anything, `^` and `$` for the
/// ends.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, from_start) = pattern.strip_prefix('^').map_or((pattern, false), |rest| (rest, true));
    let (pattern, to_end) = pattern.strip_suffix('$').map_or((pattern, false), |rest| (rest, true));
    let parts: Vec<&str> = pattern.split('*').collect();
    let (last, mut rest) = (parts.len() - 1, text);
    for (at, part) in parts.iter().enumerate() {
        if at == last && to_end {
            let anchored = at == 0 && from_start;
            return if anchored { rest == *part } else { rest.ends_with(part) };
        }
        if at == 0 && from_start {
            match rest.strip_prefix(part) {
                Some(after) => rest = after,
                None => return false,
            }
        } else {
            match rest.find(part) {
                Some(found) => rest = &rest[found + part.len()..],
                None => return false,
            }
        }
    }
    true
}

/// Whether a pattern matches a frame: its function, its file, or `file:line`.
pub fn matches_frame(pattern: &str, frame: &Frame) -> bool {
    matches(pattern, &frame.function)
        || matches(pattern, &frame.file)
        || matches(pattern, &format!("{}:{}", frame.file, frame.line))
}

/// Whether a pattern matches a finding: a frame of its stack, the line that keeps it, or its holder.
pub fn matches_finding(pattern: &str, finding: &Finding) -> bool {
    let places = finding.sites_in_finding.iter().filter_map(|site| site.allocated_at.as_ref());
    finding.stack.iter().chain(&finding.allocated_at).chain(places).any(|frame| matches_frame(pattern, frame))
        || finding.kept_at.as_ref().is_some_and(|kept| {
            matches(pattern, &format!("{}:{}", kept.file, kept.line)) || matches(pattern, &kept.code)
        })
        || finding.held_by.as_ref().is_some_and(|held| matches(pattern, &held.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_read() {
        assert_eq!(growth("0 B/step"), Ok(Growth { bytes: 0.0, per_epoch: false }));
        assert_eq!(growth("1.5 MiB / epoch"), Ok(Growth { bytes: 1_572_864.0, per_epoch: true }));
        assert_eq!(budget("a=b.py:3=2k"), Ok(Budget { site: "a=b.py:3".into(), bytes: 2048.0 }));
        for wrong in ["", "0 B", "1 MiB/hour", "x/step", "1 parsec/step", "-1/step"] {
            assert!(growth(wrong).is_err(), "{wrong}");
        }
        for wrong in ["model.py", "=3", "a=much"] {
            assert!(budget(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn patterns_match_as_leaksanitizer_s_do() {
        for (pattern, text, expected) in [
            ("model", "/home/me/model.py", true),
            ("^model", "/home/me/model.py", false),
            ("^/home*model.py$", "/home/me/model.py", true),
            ("model.py$", "/home/me/model.py:17", false),
            ("me*py:17", "/home/me/model.py:17", true),
            ("py*me", "/home/me/model.py", false),
            ("^forward$", "forward", true),
            ("^forward$", "forward_once", false),
            ("^for*$", "forward_once", true),
            ("*", "", true),
            ("a*a$", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} on {text}");
        }
    }

    #[test]
    fn a_suppression_file_is_read_or_refused_by_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# known\n\nleak:libfoo\n leak: bar*baz \n").unwrap();
        let read: Vec<String> = suppressions(file.path()).unwrap().into_iter().map(|s| s.pattern).collect();
        assert_eq!(read, ["libfoo", "bar*baz"]);
        std::fs::write(file.path(), "leak:a\nrace:b\n").unwrap();
        assert!(suppressions(file.path()).unwrap_err().contains(":2: \"race:b\""));
    }
}
