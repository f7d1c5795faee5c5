//! The OpenAPI document of the native API, made from its handlers and types.

use axum::Router;
use utoipa::openapi::path::PathItem;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr,
    ResponseBuilder, SecurityRequirement,
};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;

use super::problem::Problem;
use super::request::Native;

const PREFIX: &str = "/api/v1";
const ERROR: &str = "Error";
/// What any operation may answer besides its result.
const FAILURES: [&str; 16] = [
    "400", "401", "403", "404", "405", "408", "409", "413", "422", "429", "500", "501", "502",
    "503", "504", "507",
];

/// The routes, and the document that describes them.
pub fn described(routes: OpenApiRouter<Native>) -> (Router<Native>, OpenApi) {
    let all = OpenApiRouter::with_openapi(base()).nest(PREFIX, routes);
    let (router, mut document) = all.split_for_parts();
    for item in document.paths.paths.values_mut() {
        complete(item);
    }
    (router, document)
}

fn base() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Sandtree")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Sandboxes for AI agents: virtual machines whose state is a tree. The native API of `sandtree serve`.",
        ));
    let failure = ResponseBuilder::new()
        .description("Why it was refused, or failed.")
        .content(
            "application/json",
            ContentBuilder::new()
                .schema(Some(Ref::from_schema_name(ERROR)))
                .build(),
        );
    let header = ApiKeyValue::with_description("X-API-KEY", "`sandtree key create` makes one.");
    let components = ComponentsBuilder::new()
        .schema(Problem::name(), Problem::schema())
        .response(ERROR, failure.build())
        .security_scheme("key", SecurityScheme::ApiKey(ApiKey::Header(header)))
        .security_scheme(
            "bearer",
            SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)),
        );
    let none: [&str; 0] = [];
    OpenApiBuilder::new()
        .info(info.build())
        .components(Some(components.build()))
        .security(Some([
            SecurityRequirement::new("key", none),
            SecurityRequirement::new("bearer", none),
        ]))
        .build()
}

/// Every operation fails in the same form, and every answer has a description.
fn complete(item: &mut PathItem) {
    let operations = [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
    ];
    for operation in operations.into_iter().flatten() {
        let responses = &mut operation.responses.responses;
        for response in responses.values_mut() {
            if let RefOr::T(response) = response
                && response.description.is_empty()
            {
                response.description = "The result.".to_owned();
            }
        }
        for status in FAILURES {
            let failure = RefOr::Ref(Ref::from_response_name(ERROR));
            responses.entry(status.to_owned()).or_insert(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn document() -> Value {
        let (_, document) = described(super::super::routes());
        serde_json::to_value(document).unwrap()
    }

    /// Method, path and operation of everything in the document.
    fn operations(document: &Value) -> Vec<(String, String, Value)> {
        let paths = document["paths"].as_object().unwrap();
        let of_path = |(path, item): (&String, &Value)| {
            let item = item.as_object().unwrap().clone();
            let path = path.clone();
            item.into_iter()
                .map(move |(method, operation)| (method, path.clone(), operation))
        };
        paths.iter().flat_map(of_path).collect()
    }

    /// The sources of the handlers.
    fn sources() -> Vec<String> {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/src/native");
        let files = std::fs::read_dir(here).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let files = files.filter(|path| !path.ends_with("document.rs"));
        files
            .map(|path| std::fs::read_to_string(path).unwrap())
            .collect()
    }

    #[test]
    fn every_handler_is_a_route_and_every_route_is_described() {
        let sources = sources();
        let count = |text: &str| -> usize { sources.iter().map(|s| s.matches(text).count()).sum() };
        assert_eq!(
            operations(&document()).len(),
            count("#[utoipa::path("),
            "a handler is missing in `routes`"
        );
        // Only the route of the document is not one of them.
        assert_eq!(count(".route("), 1, "add routes by `routes!`");
    }

    #[test]
    fn operations_have_names_words_and_errors() {
        let document = document();
        let mut names = BTreeSet::new();
        for (method, path, operation) in operations(&document) {
            assert!(path.starts_with(PREFIX), "{path}");
            let name = operation["operationId"].as_str().unwrap().to_owned();
            assert!(names.insert(name), "{method} {path} has another's name");
            assert!(operation["summary"].is_string(), "{method} {path}");
            assert!(operation["tags"][0].is_string(), "{method} {path}");
            let refused = &operation["responses"]["404"]["$ref"];
            assert_eq!(refused, "#/components/responses/Error", "{method} {path}");
        }
    }

    #[test]
    fn every_schema_that_is_mentioned_is_there() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let text = document.to_string();
        let mentioned = text.split("#/components/schemas/").skip(1);
        let mentioned = mentioned.map(|rest| rest.split('"').next().unwrap());
        for name in mentioned {
            assert!(schemas.contains_key(name), "{name}");
        }
        for name in [
            "SandboxInfo",
            "Checkpoint",
            "Degradation",
            "Error",
            "Forked",
        ] {
            assert!(schemas.contains_key(name), "{name}");
        }
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for (name, schema) in schemas {
            let properties = schema["properties"].as_object();
            for property in properties.into_iter().flat_map(|all| all.keys()) {
                let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                assert!(property.chars().all(is_plain), "{name}.{property}");
            }
        }
    }
}
