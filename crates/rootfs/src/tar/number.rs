//! Numbers of tar headers: octal digits, base 256, and decimal in PAX records.

use sandtree_disk::ext4::write::Time;

type Bad = &'static str;

/// Parses a field of a header. An empty field is 0.
pub(super) fn field(field: &[u8]) -> Result<i64, Bad> {
    match field {
        [first, rest @ ..] if first & 0x80 != 0 => base_256(*first, rest),
        _ => octal(field),
    }
}

pub(super) fn unsigned(bytes: &[u8]) -> Result<u64, Bad> {
    u64::try_from(field(bytes)?).map_err(|_| "a number of a header is negative")
}

pub(super) fn id(bytes: &[u8]) -> Result<u32, Bad> {
    u32::try_from(field(bytes)?).map_err(|_| "a number of a header is out of range")
}

fn octal(field: &[u8]) -> Result<i64, Bad> {
    let is_blank = |byte: &u8| *byte == b' ' || *byte == 0;
    let start = field
        .iter()
        .position(|byte| !is_blank(byte))
        .unwrap_or(field.len());
    let digits = &field[start..];
    let end = digits.iter().position(is_blank).unwrap_or(digits.len());
    if !digits[end..].iter().all(is_blank) {
        return Err("a number of a header is followed by other characters");
    }
    digits[..end]
        .iter()
        .try_fold(0i64, |number, digit| match digit {
            b'0'..=b'7' => number
                .checked_mul(8)
                .map(|n| n + i64::from(digit - b'0'))
                .ok_or("a number of a header is out of range"),
            _ => Err("a number of a header is not octal"),
        })
}

/// Parses two's complement. Its first bit only marks the form.
fn base_256(first: u8, rest: &[u8]) -> Result<i64, Bad> {
    let sign: i64 = if first & 0x40 == 0 { 0 } else { -1 };
    let start = sign << 6 | i64::from(first & 0x3f);
    rest.iter().try_fold(start, |number, byte| {
        number
            .checked_mul(256)
            .map(|n| n | i64::from(*byte))
            .ok_or("a number of a header is out of range")
    })
}

pub(super) fn decimal<T: std::str::FromStr>(text: &[u8]) -> Result<T, Bad> {
    let text = std::str::from_utf8(text)
        .ok()
        .filter(|text| !text.is_empty() && !text.starts_with('+'));
    text.and_then(|text| text.parse().ok())
        .ok_or("a number of an extended header is invalid or out of range")
}

/// Parses seconds with a fraction, of which nine digits count: `-1.5` is half a second after -2.
pub(super) fn time(text: &[u8]) -> Result<Time, Bad> {
    let dot = text
        .iter()
        .position(|byte| *byte == b'.')
        .unwrap_or(text.len());
    let whole = &text[..dot];
    let fraction = text.get(dot + 1..).unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return Err("a time of an extended header is invalid");
    }
    let digits = fraction.iter().chain(std::iter::repeat(&b'0')).take(9);
    let nanoseconds = digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    let seconds: i64 = decimal(whole)?;
    if !whole.starts_with(b"-") || nanoseconds == 0 {
        return Ok(Time {
            seconds,
            nanoseconds,
        });
    }
    let seconds = seconds
        .checked_sub(1)
        .ok_or("a time of an extended header is out of range")?;
    Ok(Time {
        seconds,
        nanoseconds: 1_000_000_000 - nanoseconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        assert_eq!(field(b"0000644\0"), Ok(0o644));
        assert_eq!(field(b"  12 \0"), Ok(10));
        assert_eq!(field(b"\0\0\0\0"), Ok(0));
        assert_eq!(field(b"777"), Ok(0o777));
        assert_eq!(field(b"\x80\0\0\0\0\0\0\0\0\0\x01\x02"), Ok(258));
        assert_eq!(field(&[0xff; 12]), Ok(-1));
        assert_eq!(
            field(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00"),
            Ok(-256)
        );
        assert_eq!(
            field(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"),
            Ok(i64::MAX)
        );
        for bad in [
            &b"8"[..],
            b"1 1",
            b"-1",
            b"\x80\0\0\0\x80\0\0\0\0\0\0\0",
            b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            assert!(field(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times() {
        let at = |seconds, nanoseconds| {
            Ok(Time {
                seconds,
                nanoseconds,
            })
        };
        assert_eq!(time(b"1.5"), at(1, 500_000_000));
        assert_eq!(time(b"7"), at(7, 0));
        assert_eq!(time(b"7.1234567899"), at(7, 123_456_789));
        assert_eq!(time(b"-1.5"), at(-2, 500_000_000));
        assert_eq!(time(b"-0.25"), at(-1, 750_000_000));
        assert_eq!(time(b"-3"), at(-3, 0));
        for bad in [
            &b""[..],
            b".5",
            b"1.x",
            b"1.5.5",
            b"x",
            b"99999999999999999999",
        ] {
            assert!(time(bad).is_err());
        }
    }
}
