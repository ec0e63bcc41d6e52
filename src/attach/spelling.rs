//! What a misspelt word was probably meant to be. Knows letters only.

/// The known word that is nearest to `word`, if one is near: at most a third of its letters differ.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    let distances =
        known.into_iter().map(|candidate| (distance(&word, &candidate.to_ascii_lowercase()), candidate));
    let (distance, candidate) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= candidate.chars().count().div_ceil(3)).then_some(candidate)
}

/// Whether `word` is `meant` with at most two letters wrong.
pub fn is_slip(word: &str, meant: &str) -> bool {
    distance(&word.to_ascii_lowercase(), &meant.to_ascii_lowercase()) <= 2
}

/// Letters to be put in, left out, changed, or exchanged with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let width = b.len() + 1;
    let mut table = vec![0; (a.len() + 1) * width];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            let at = |i: usize, j: usize| table[i * width + j];
            table[i * width + j] = if i == 0 || j == 0 {
                i + j
            } else {
                let changed = at(i - 1, j - 1) + usize::from(a[i - 1] != b[j - 1]);
                let best = changed.min(at(i - 1, j) + 1).min(at(i, j - 1) + 1);
                let exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                if exchanged { best.min(at(i - 2, j - 2) + 1) } else { best }
            };
        }
    }
    table[a.len() * width + b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_seen_through_and_other_words_are_not() {
        let modes = ["auto", "heap", "observer", "host", "off"];
        for (slip, meant) in [("hoost", "host"), ("Heap", "heap"), ("obsever", "observer"), ("atuo", "auto")]
        {
            assert_eq!(nearest(slip, modes), Some(meant), "{slip}");
        }
        assert_eq!(nearest("cuda-everything", modes), None);
        assert_eq!(nearest("x", []), None);
        assert!(is_slip("STRANDLNE", "STRANDLINE") && !is_slip("STANDALONE", "STRANDLINE"));
        assert_eq!((distance("", ""), distance("abc", ""), distance("ab", "ba")), (0, 3, 1));
    }
}
