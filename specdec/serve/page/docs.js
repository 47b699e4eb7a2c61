// The interface's description, written out from openapi.json.
'use strict';

function node(name, text = '', ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(' | ');
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' | ');
  if (schema.type === 'array') return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? 'any';
}

function fields(schema) {
  const table = node('table', '', node('tr', '', ...['field', 'type', 'what'].map((title) => node('th', title))));
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const needed = (schema.required ?? []).includes(name) ? ' (required)' : '';
    const cells = [node('td', '', node('code', name)), node('td', typeOf(field)), node('td', (field.description ?? '') + needed)];
    table.append(node('tr', '', ...cells));
  }
  return table;
}

async function show() {
  const place = document.getElementById('operations');
  const made = await (await fetch('openapi.json')).json();
  place.textContent = '';
  for (const [path, operations] of Object.entries(made.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const box = node('details', '', node('summary', '', node('code', `${method.toUpperCase()} ${path}`)));
      box.append(node('p', operation.description ?? operation.summary));
      const body = operation.requestBody?.content['application/json'].schema.$ref;
      if (body) box.append(fields(made.components.schemas[body.split('/').pop()]));
      const answers = Object.entries(operation.responses).map(([status, answer]) => node('li', `${status}: ${answer.description}`));
      box.append(node('ul', '', ...answers));
      place.append(box);
    }
  }
}

show().catch((error) => {
  document.getElementById('operations').textContent = String(error);
});
