"use strict";
// Draws /openapi.json as a list: method, path, what it does, parameters and body.

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function nameOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(nameOf).join(" or ");
  return schema.enum ? schema.enum.join(" | ") : schema.type || "any";
}

function fields(schema, all) {
  const target = schema && schema.$ref ? all[schema.$ref.split("/").pop()] : schema;
  return Object.entries((target && target.properties) || {}).map(([name, value]) => `${name}: ${nameOf(value)}`);
}

async function draw() {
  const api = await (await fetch("/openapi.json")).json();
  const schemas = (api.components || {}).schemas || {};
  const list = document.getElementById("operations");
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const card = element("section", "card wide");
      const head = element("h3");
      head.append(element("span", "badge", method.toUpperCase()), " ", element("code", "", path));
      card.append(head, element("p", "", operation.description || operation.summary || ""));
      for (const parameter of operation.parameters || []) {
        card.append(element("p", "detail", `${parameter.in} ${parameter.name}: ${nameOf(parameter.schema)}`));
      }
      for (const [type, body] of Object.entries((operation.requestBody || {}).content || {})) {
        card.append(element("p", "detail", `body ${type}: ${fields(body.schema, schemas).join(", ")}`));
      }
      for (const [status, answer] of Object.entries(operation.responses || {})) {
        const json = (answer.content || {})["application/json"];
        if (status < "300" && json) {
          const inside = fields(json.schema, schemas);
          card.append(element("p", "detail", `${status}: ${inside.join(", ") || nameOf(json.schema)}`));
        }
      }
      list.append(card);
    }
  }
}

draw();
