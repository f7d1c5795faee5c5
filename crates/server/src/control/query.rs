//! Queries of lists: filters and pages.

use std::collections::BTreeMap;

use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use crate::error::{Fault, Result};

const LIMIT: usize = 100;

/// The place of a page: the position after the last element of the page before.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PageQuery {
    pub limit: Option<usize>,
    pub next_token: Option<String>,
}

impl PageQuery {
    /// One page of a list, with the token of the next one in a header.
    pub fn page<T: Serialize>(&self, all: Vec<T>) -> Result<Response> {
        let limit = self.limit.unwrap_or(LIMIT);
        if !(1..=LIMIT).contains(&limit) {
            return Err(Fault::bad_request("limit is a number from 1 to 100"));
        }
        let begin = match &self.next_token {
            None => 0,
            Some(token) => token
                .parse::<usize>()
                .map_err(|_| Fault::bad_request("invalid nextToken"))?,
        };
        let count = all.len();
        let page: Vec<T> = all.into_iter().skip(begin).take(limit).collect();
        let end = begin + page.len();
        let mut response = axum::Json(page).into_response();
        if end < count {
            response.headers_mut().insert("x-next-token", end.into());
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

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn pages_follow_each_other() {
        let page = |limit, token: Option<&str>| {
            let query = PageQuery {
                limit: Some(limit),
                next_token: token.map(str::to_owned),
            };
            query.page(vec![1, 2, 3])
        };
        let next = |response: &Response| {
            let token = response.headers().get("x-next-token")?;
            Some(token.to_str().unwrap().to_owned())
        };
        let first = page(2, None).unwrap();
        assert_eq!(next(&first).as_deref(), Some("2"));
        let last = page(2, Some("2")).unwrap();
        assert_eq!(next(&last), None);
        assert!(page(0, None).is_err() && page(101, None).is_err());
        assert!(page(1, Some("x")).is_err());
    }
}
