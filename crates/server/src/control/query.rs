//! Queries of lists: filters and pages.

use std::collections::BTreeMap;
use std::time::UNIX_EPOCH;

use axum::response::{IntoResponse, Response};
use hyper::header::HeaderValue;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use crate::error::{Fault, Result};

const LIMIT: usize = 100;

/// Where an element stands in a list: by its time, and then by its id. Others may come and go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub at_unix_ms: u64,
    pub id: String,
}

impl Place {
    fn token(&self) -> String {
        format!("{}-{}", self.at_unix_ms, self.id)
    }

    fn parse(token: &str) -> Option<Self> {
        let (at, id) = token.split_once('-')?;
        Some(Self {
            at_unix_ms: at.parse().ok()?,
            id: id.to_owned(),
        })
    }
}

/// The order of a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Oldest first.
    Asc,
    #[default]
    Desc,
}

/// The place of a page: after the last element of the page before.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PageQuery {
    pub limit: Option<usize>,
    pub next_token: Option<String>,
}

impl PageQuery {
    /// One page of an ordered list, with the token of the next one in a header.
    pub fn page<T: Serialize>(&self, all: Vec<(Place, T)>, order: Order) -> Result<Response> {
        let limit = self.limit.unwrap_or(LIMIT);
        if !(1..=LIMIT).contains(&limit) {
            return Err(Fault::bad_request("limit is a number from 1 to 100"));
        }
        let begin = match &self.next_token {
            None => 0,
            Some(token) => {
                let invalid = || Fault::bad_request("invalid nextToken");
                let last = Place::parse(token).ok_or_else(invalid)?;
                all.partition_point(|(place, _)| match order {
                    Order::Asc => *place <= last,
                    Order::Desc => *place >= last,
                })
            }
        };
        let has_more = all.len() - begin > limit;
        let page = all.into_iter().skip(begin).take(limit);
        let (places, page): (Vec<Place>, Vec<T>) = page.unzip();
        let mut response = axum::Json(page).into_response();
        if let Some(last) = places.last().filter(|_| has_more) {
            let token = HeaderValue::from_str(&last.token());
            let token = token.map_err(|_| Fault::internal("an id is not a text"))?;
            response.headers_mut().insert("x-next-token", token);
        }
        Ok(response)
    }
}

/// Metadata that a list asks for: a form in which each name and value is encoded once more.
pub fn metadata(text: &str) -> Result<BTreeMap<String, String>> {
    let decoded = |part: &str| {
        let once = part.replace('+', " ");
        let once = percent_decode_str(&once).decode_utf8().ok()?.into_owned();
        Some(percent_decode_str(&once).decode_utf8().ok()?.into_owned())
    };
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((decoded(name)?, decoded(value)?))
    };
    let pairs = text.split('&').filter(|text| !text.is_empty());
    let found: Option<BTreeMap<_, _>> = pairs.map(pair).collect();
    found.ok_or_else(|| Fault::bad_request("invalid metadata filter"))
}

/// A time as clients write it: in UTC, or with its distance from UTC.
pub fn unix_ms(text: &str) -> Result<u64> {
    let invalid = || {
        let message = format!("invalid time {text:?}: use RFC 3339, as 2026-11-18T09:30:00+01:00");
        Fault::bad_request(message)
    };
    let (local, ahead_ms) = match text.split_at_checked(text.len().saturating_sub(6)) {
        Some((local, offset)) if !text.ends_with('Z') => {
            (local, offset_ms(offset).ok_or_else(invalid)?)
        }
        _ => (text.trim_end_matches('Z'), 0),
    };
    let local = humantime::parse_rfc3339(&format!("{local}Z")).map_err(|_| invalid())?;
    let local = local.duration_since(UNIX_EPOCH).map_err(|_| invalid())?;
    let local_ms = i64::try_from(local.as_millis()).map_err(|_| invalid())?;
    Ok(u64::try_from(local_ms - ahead_ms).unwrap_or(0))
}

/// `+01:00`
fn offset_ms(text: &str) -> Option<i64> {
    let (hours, minutes) = text.get(1..)?.split_once(':')?;
    let ms = (hours.parse::<u32>().ok()? * 60 + minutes.parse::<u32>().ok()?) * 60_000;
    match text.as_bytes().first()? {
        b'+' => Some(i64::from(ms)),
        b'-' => Some(-i64::from(ms)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_offset() {
        let noon = 1_800_014_400_000;
        assert_eq!(unix_ms("2027-01-15T12:00:00Z").unwrap(), noon);
        assert_eq!(unix_ms("2027-01-15T12:00:00.5+00:00").unwrap(), noon + 500);
        assert_eq!(unix_ms("2027-01-15T13:30:00+01:30").unwrap(), noon);
        assert_eq!(unix_ms("2027-01-15T04:00:00-08:00").unwrap(), noon);
        for wrong in [
            "",
            "Z",
            "now",
            "2027-01-15",
            "2027-01-15T12:00:00",
            "é+01:00",
        ] {
            assert!(unix_ms(wrong).is_err(), "{wrong}");
        }
    }

    /// `metadata=a%3Db%252520c` on the wire, after the decoding of the query.
    #[test]
    fn metadata_is_decoded_as_clients_encode_it() {
        let found = metadata("a=b%2520c").unwrap();
        assert_eq!(found["a"], "b c");
        let found = metadata("a=1&k%253D=%2526").unwrap();
        assert_eq!(found["k="], "&");
        assert!(metadata("").unwrap().is_empty());
        assert!(metadata("a").is_err());
    }

    #[tokio::test]
    async fn pages_follow_each_other_whatever_is_removed() {
        let page = |all: &[u64], limit, token: Option<&str>, order| {
            let query = PageQuery {
                limit: Some(limit),
                next_token: token.map(str::to_owned),
            };
            let placed = all.iter().map(|at| {
                let id = format!("id-{at}");
                let at_unix_ms = *at;
                (Place { at_unix_ms, id }, *at)
            });
            query.page(placed.collect(), order)
        };
        let next = |response: &Response| {
            let token = response.headers().get("x-next-token")?;
            Some(token.to_str().unwrap().to_owned())
        };
        let first = page(&[1, 2, 3], 2, None, Order::Asc).unwrap();
        assert_eq!(next(&first).as_deref(), Some("2-id-2"));
        let last = page(&[3], 1, Some("2-id-2"), Order::Asc).unwrap();
        assert_eq!(next(&last), None);
        assert_eq!(text(last).await, "[3]");
        let after = page(&[9, 8, 5, 3], 1, Some("7-id-7"), Order::Desc).unwrap();
        assert_eq!(next(&after).as_deref(), Some("5-id-5"));
        assert_eq!(text(after).await, "[5]");
        let none = page(&[9, 8], 1, Some("7-id-7"), Order::Desc).unwrap();
        assert_eq!(text(none).await, "[]");
        let refused = |limit, token: Option<&str>| page(&[1], limit, token, Order::Asc).is_err();
        assert!(refused(0, None) && refused(101, None) && refused(1, Some("x")));
    }

    async fn text(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), 1024).await;
        String::from_utf8(bytes.unwrap().to_vec()).unwrap()
    }
}
