//! What of a report concerns one library or package: findings and sites with a frame of it on their stack.
//!
//! Must not know: forms, how stacks are captured.
//! Invariant: what is left out is counted; verdict and numbers of the device stay those of the whole run.

use super::model::{Finding, Report, Verdict};
use crate::ledger::Frame;

/// How much a focus left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hidden {
    pub findings: usize,
    pub sites: usize,
}

/// Whether a source file belongs to `library`: a package's folder ("torchmetrics"), a file ("train.py", "train"), or
/// a part of the path ("my_pkg/models").
pub fn is_of(file: &str, library: &str) -> bool {
    let library = library.trim_matches('/').replace('\\', "/");
    if library.is_empty() {
        return true;
    }
    let dotted = library.replace('.', "/");
    let wanted: Vec<&str> =
        if library.ends_with(".py") { library.split('/').collect() } else { dotted.split('/').collect() };
    let parts: Vec<&str> = file.split('/').collect();
    parts.windows(wanted.len()).any(|window| {
        window.iter().zip(&wanted).enumerate().all(|(at, (part, want))| {
            part == want
                || at + 1 == wanted.len() && part.strip_suffix(".py").is_some_and(|stem| stem == *want)
        })
    })
}

fn on(stack: &[Frame], library: &str) -> bool {
    stack.iter().any(|frame| is_of(&frame.file, library))
}

/// Whether a finding's stack, its kept line or one of its sites is in `library`.
pub fn concerns(finding: &Finding, library: &str) -> bool {
    on(&finding.stack, library)
        || finding.kept_at.as_ref().is_some_and(|kept| is_of(&kept.file, library))
        || finding.sites_in_finding.iter().any(|site| on(site.allocated_at.as_slice(), library))
}

/// The report with only what concerns `library`, and what was left out.
pub fn focus(report: &Report, library: &str) -> (Report, Hidden) {
    let mut focused = report.clone();
    focused.run.focus = library.to_owned();
    focused.findings.retain(|finding| concerns(finding, library));
    focused.sites.retain(|site| on(&site.stack, library));
    let hidden = Hidden {
        findings: report.findings.len() - focused.findings.len(),
        sites: report.sites.len() - focused.sites.len(),
    };
    if focused.findings.is_empty() && matches!(report.verdict, Verdict::Leak | Verdict::Fragmentation) {
        focused.reason = format!("{} (none of it on a stack of {library})", report.reason);
    }
    (focused, hidden)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_a_module_and_a_part_of_a_path() {
        let file = "/v/lib/python3.11/site-packages/torchmetrics/classification/stat.py";
        assert!(is_of(file, "torchmetrics"));
        assert!(is_of(file, "torchmetrics.classification"));
        assert!(is_of(file, "torchmetrics/classification/stat.py"));
        assert!(is_of(file, "torchmetrics.classification.stat"));
        assert!(!is_of(file, "metrics") && !is_of(file, "torch") && !is_of(file, "stat/classification"));
        assert!(is_of("/home/u/train.py", "train") && is_of("/home/u/train.py", "train.py"));
    }
}
