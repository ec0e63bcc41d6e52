//! The results of `strandline check` as text, JUnit XML and GitHub annotations.
//!
//! Must not know: what is checked.

use crate::check::Suite;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// For people.
pub fn text(suites: &[Suite]) -> String {
    let mut out = String::new();
    for suite in suites {
        let _ = writeln!(out, "{}  ({})", suite.name, suite.facts);
        for test in &suite.tests {
            let word = if test.problems.is_empty() { "ok" } else { "FAIL" };
            let _ = writeln!(out, "  {word:<6}{}: {}", test.name, test.found);
            for problem in test.problems.iter().filter(|problem| problem.text != test.found) {
                let _ = writeln!(out, "        {}", problem.text);
            }
        }
        for note in &suite.notes {
            let _ = writeln!(out, "  note  {note}");
        }
    }
    out
}

/// The form that CI servers read: a suite for each report, a case for each check.
pub fn junit(suites: &[Suite]) -> String {
    let failures = |suite: &Suite| suite.tests.iter().filter(|test| !test.problems.is_empty()).count();
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        out,
        "<testsuites name=\"strandline\" tests=\"{}\" failures=\"{}\">",
        suites.iter().map(|suite| suite.tests.len()).sum::<usize>(),
        suites.iter().map(failures).sum::<usize>()
    );
    for suite in suites {
        let _ = writeln!(
            out,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"0\">",
            xml(&suite.name),
            suite.tests.len(),
            failures(suite)
        );
        for test in &suite.tests {
            let _ = write!(
                out,
                "    <testcase classname=\"strandline.{}\" name=\"{}\"",
                test.kind.name(),
                xml(&test.name)
            );
            if test.problems.is_empty() {
                out += "/>\n";
                continue;
            }
            let texts: Vec<&str> = test.problems.iter().map(|problem| problem.text.as_str()).collect();
            let _ = writeln!(
                out,
                ">\n      <failure type=\"{}\" message=\"{}\">{}</failure>\n    </testcase>",
                test.kind.name(),
                xml(&test.found),
                xml(&texts.join("\n"))
            );
        }
        out += "  </testsuite>\n";
    }
    out + "</testsuites>\n"
}

/// Text inside XML; what XML cannot hold is replaced.
fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&apos;",
            '\n' => out += "&#10;",
            '\t' => out += "&#9;",
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Workflow commands of GitHub Actions: each problem at its line in the sources.
pub fn github(suites: &[Suite], workspace: Option<PathBuf>) -> String {
    let mut out = String::new();
    for test in suites.iter().flat_map(|suite| &suite.tests) {
        for problem in &test.problems {
            out += "::error ";
            if let Some((file, line)) = &problem.place {
                let path = Path::new(file);
                let inside =
                    workspace.as_deref().and_then(|root| path.strip_prefix(root).ok()).unwrap_or(path);
                let _ = write!(out, "file={},line={line},", property(&inside.display().to_string()));
            }
            let title = format!("strandline: {}", test.name);
            let _ = writeln!(out, "title={}::{}", property(&title), message(&problem.text));
        }
    }
    out
}

fn message(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    message(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_xml_and_github_cannot_hold_is_escaped() {
        assert_eq!(xml("a<b>&\"'\u{1}\n"), "a&lt;b&gt;&amp;&quot;&apos;\u{fffd}&#10;");
        assert_eq!(property("a:b,c%\n"), "a%3Ab%2Cc%25%0A");
        assert_eq!(message("a:b,c%\n"), "a:b,c%25%0A");
    }
}
