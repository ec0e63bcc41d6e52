//! Which files are the user's own, so that a report can say "you wrote this line".
//!
//! Must not know anything but file names. The rule, in order: below a user root it is the user's; below
//! a library root (the standard library, as the Python side knows it, and strandline's own files) it is
//! not; names in angle brackets are the user's when they stand for something typed in; generated code
//! is not; `site-packages`, `dist-packages` and `lib/python3.X` are not; all else is.
#![deny(unsafe_code)]

/// The roots that decide before the file's own name does.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    user_roots: Vec<String>,
    library_roots: Vec<String>,
}

/// Typed in by the user: the shell, `python -c`, notebooks, doctests.
const TYPED: [&str; 6] = ["<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest"];
/// Written by torch's compiler, wherever it puts that.
const GENERATED: [&str; 4] =
    ["/torch/_dynamo/", "/torch/_inductor/", "/torchinductor_", "/torch_compile_debug/"];

impl Rule {
    pub const fn new() -> Rule {
        Rule { user_roots: Vec::new(), library_roots: Vec::new() }
    }

    pub fn set_user_roots(&mut self, roots: Vec<String>) {
        self.user_roots = roots;
    }

    pub fn set_library_roots(&mut self, roots: Vec<String>) {
        self.library_roots = roots;
    }

    pub fn is_user(&self, file: &str) -> bool {
        let below = |roots: &[String]| roots.iter().any(|root| is_below(file, root));
        if file.is_empty() {
            return false;
        }
        if below(&self.user_roots) {
            return true;
        }
        if below(&self.library_roots) {
            return false;
        }
        if file.starts_with('<') {
            return TYPED.iter().any(|typed| file.starts_with(typed));
        }
        !GENERATED.iter().any(|part| file.contains(part)) && !is_installed(file)
    }
}

fn is_below(file: &str, root: &str) -> bool {
    let root = root.trim_end_matches('/');
    !root.is_empty() && file.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'))
}

/// Below `site-packages`, `dist-packages`, `lib/python3.X` (also `lib64`) or in `python3X.zip`.
fn is_installed(file: &str) -> bool {
    let mut parts = file.split('/').rev().skip(1).collect::<Vec<_>>();
    parts.reverse();
    parts.iter().any(|part| matches!(*part, "site-packages" | "dist-packages") || is_zip(part))
        || parts.windows(2).any(|pair| matches!(pair[0], "lib" | "lib64") && is_python(pair[1]))
}

fn is_python(part: &str) -> bool {
    part.strip_prefix("python3").is_some_and(|rest| {
        rest.is_empty()
            || rest.strip_prefix('.').is_some_and(|minor| minor.trim_end_matches('t').parse::<u32>().is_ok())
    })
}

fn is_zip(part: &str) -> bool {
    part.strip_prefix("python3")
        .and_then(|rest| rest.strip_suffix(".zip"))
        .is_some_and(|minor| minor.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule() {
        let mut rule = Rule::new();
        rule.set_library_roots(vec!["/opt/py/stdlib/".into(), "/src/strandline/python".into()]);
        rule.set_user_roots(vec!["/venv/lib/python3.12/site-packages/mine".into()]);
        for (file, user) in [
            ("train.py", true),
            ("/home/me/train.py", true),
            ("/home/me/lib/python3.11-experiments/a.py", true),
            ("/home/me/lib/models/python3.py", true),
            ("/tmp/ipykernel_4711/123.py", true),
            ("<stdin>", true),
            ("<string>", true),
            ("<ipython-input-3-abc>", true),
            ("<python-input-0>", true),
            ("<frozen importlib._bootstrap>", false),
            ("<strandline boot>", false),
            ("<eval_with_key>.5", false),
            ("<attrs generated init a.B>", false),
            ("", false),
            ("/usr/lib/python3.11/threading.py", false),
            ("/usr/lib64/python3.9/json/decoder.py", false),
            ("/usr/lib/python3/dist-packages/numpy/a.py", false),
            ("/usr/lib/python3.13t/queue.py", false),
            ("/usr/lib/python311.zip/queue.py", false),
            ("/home/me/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py", false),
            ("/venv/lib/python3.12/site-packages/mine/net.py", true),
            ("/venv/lib/python3.12/site-packages/mine2/net.py", false),
            ("/opt/py/stdlib/queue.py", false),
            ("/opt/py/stdlib2/queue.py", true),
            ("/src/strandline/python/strandline/hooks.py", false),
            ("/src/pytorch/torch/_dynamo/eval_frame.py", false),
            ("/tmp/torchinductor_me/ab/cab.py", false),
        ] {
            assert_eq!(rule.is_user(file), user, "{file}");
        }
    }
}
