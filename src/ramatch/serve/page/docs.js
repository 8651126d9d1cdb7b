// Shows openapi.json as a readable page; the usual viewers load themselves from the internet.
"use strict";
const make = (tag, text, name) => Object.assign(document.createElement(tag), text === undefined ? {} : { textContent: text }, name ? { className: name } : {});

function kind(schema, spec) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((s) => kind(s, spec)).filter((s) => s !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items, spec) : "anything"}`;
  return schema.format === "binary" ? "file" : schema.type || "anything";
}

function fields(schema, spec) {
  if (schema.$ref) schema = spec.components.schemas[schema.$ref.split("/").pop()];
  if (!schema.properties) return make("p", schema.description || kind(schema, spec), "text");
  const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const title of ["field", "type", ""]) head.append(make("th", title));
  for (const [name, field] of Object.entries(schema.properties)) {
    const row = body.insertRow(), needed = schema.required?.includes(name) ? " (needed)" : "";
    row.insertCell().append(make("code", name), needed);
    row.insertCell().textContent = kind(field, spec);
    row.insertCell().textContent = field.description || "";
  }
  const scroll = make("div", undefined, "scroll");
  scroll.append(table);
  return scroll;
}

function example(verb, path, operation) {
  const url = location.origin + path, content = operation.requestBody?.content || {};
  if (path === "/v1/tag") return `curl ${url} -F image=@photo.jpg -F labels='dog, umbrella, kite' -F top=5`;
  if (path === "/v1/tag/batch") return `curl ${url} -F image=@one.jpg -F image=@two.jpg -F vocabulary=coco80 -F threshold=0.5`;
  if (path === "/v1/search") return `curl ${url} -G --data-urlencode 'q=dog -person' -d limit=20`;
  if (content["text/plain"]) return `curl -X PUT ${url.replace("{name}", "pets")} -H 'Content-Type: text/plain' --data-binary @pets.txt`;
  return `curl ${verb === "get" ? "" : `-X ${verb.toUpperCase()} `}${url.replace("{name}", "coco80").replace("{photo}", "1")}`;
}

function show(verb, path, operation, spec) {
  const details = make("details"), summary = make("summary");
  summary.append(make("span", verb.toUpperCase(), "verb"), make("code", path), make("span", operation.summary || "", "text"));
  details.append(summary);
  if (operation.description) details.append(make("p", operation.description, "text"));
  details.append(make("pre", example(verb, path, operation)));
  const parameters = operation.parameters || [];
  if (parameters.length) {
    const required = parameters.filter((each) => each.required).map((each) => each.name);
    details.append(make("h4", "In the address"), fields({ required, properties: Object.fromEntries(parameters.map((each) => [each.name, each.schema])) }, spec));
  }
  for (const [type, { schema }] of Object.entries(operation.requestBody?.content || {})) details.append(make("h4", `Body, ${type}`), fields(schema, spec));
  for (const [status, response] of Object.entries(operation.responses)) {
    const schema = response.content?.["application/json"]?.schema;
    details.append(make("h4", `${status}: ${response.description}`));
    if (schema && status < 300) details.append(fields(schema, spec));
  }
  return details;
}

fetch("openapi.json").then((response) => response.json()).then((spec) => {
  const groups = new Map();
  for (const [path, verbs] of Object.entries(spec.paths)) for (const [verb, operation] of Object.entries(verbs)) {
    const group = operation.tags?.[0] || "other";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(show(verb, path, operation, spec));
  }
  const main = document.getElementById("operations");
  for (const [group, parts] of groups) main.append(make("h2", group), ...parts);
  main.querySelector("details").open = true;
});
