//! Text from elsewhere, made safe to print: a terminal obeys some characters, and a line break forges
//! a line of a log.

use alloc::string::String;

/// Returns text in which nothing is left that a terminal or a log would obey: characters that are
/// not printable become escapes such as `\u{1b}` and `\n`, and bytes that are no UTF-8 become `�`.
/// Of longer texts the first `limit_bytes` are kept.
#[must_use]
pub fn escaped(text: &[u8], limit_bytes: usize) -> String {
    let kept = &text[..text.len().min(limit_bytes)];
    let mut shown = String::with_capacity(kept.len());
    for character in String::from_utf8_lossy(kept).chars() {
        match character {
            '"' | '\'' | '\\' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    if kept.len() < text.len() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::escaped;
    use alloc::string::String;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    #[test]
    fn printable_text_stays_as_it_is() {
        for text in ["", "rank 1's \"weight\" (a\\b)", "Größe ±3 µs, 日本語 ✓"] {
            assert_eq!(escaped(text.as_bytes(), 100), text);
        }
    }

    #[test]
    fn terminals_and_logs_are_told_nothing() {
        let text = "a\x1b[2J\r\nerror: b\u{202e}\u{2028}\u{9b}c\u{7f}";
        let shown = escaped(text.as_bytes(), 100);
        assert_eq!(shown, r"a\u{1b}[2J\r\nerror: b\u{202e}\u{2028}\u{9b}c\u{7f}");
        assert_eq!(escaped(b"\xff\x00", 100), "\u{fffd}\\0");
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(escaped(&[b'x'; 9], 4), "xxxx...");
        assert_eq!(escaped("ää".as_bytes(), 3), "ä\u{fffd}...");
    }

    proptest! {
        #[test]
        fn nothing_is_left_to_obey_and_escaping_twice_changes_nothing(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), text in any::<String>(),
        ) {
            for bytes in [bytes, text.into_bytes()] {
                let shown = escaped(&bytes, 1_000);
                let obeyed = |it: char| it.is_control() || ('\u{2028}'..='\u{202e}').contains(&it);
                prop_assert!(!shown.contains(obeyed));
                prop_assert_eq!(escaped(shown.as_bytes(), usize::MAX), shown.clone());
                prop_assert!(shown.len() <= 12 * bytes.len());
                let whole: Vec<u8> = escaped(&bytes, 10).into_bytes();
                prop_assert!(whole.len() <= 123);
            }
        }
    }
}
