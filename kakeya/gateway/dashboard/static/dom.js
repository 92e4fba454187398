// Building blocks: elements, and the update of what is shown in place, so that focus, selection and
// scroll positions stay where they are. Then figures and times as people write them.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "line", "path", "circle", "polygon"]);

/** Make an element. A child is an element, a text or a number, or a list; null, false and "" are none. */
export function h(tag, attributes, ...children) {
  const made = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else if (name.startsWith("on")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(9).filter((one) => one !== null && one !== undefined && one !== false && one !== ""));
  return made;
}

/** Make `shown` like `wanted`, changing only what differs. */
export function morph(shown, wanted) {
  for (const { name } of [...shown.attributes]) if (!wanted.hasAttribute(name) && name !== "style") shown.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (name !== "style" && shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  if (shown.style.cssText !== wanted.style.cssText) shown.style.cssText = wanted.style.cssText;
  for (const event of ["onclick", "onsubmit", "onchange", "onkeydown"]) shown[event] = wanted[event];
  morphChildren(shown, [...wanted.childNodes]);
}

export function morphChildren(shown, wanted) {
  wanted.forEach((one, index) => {
    let here = shown.childNodes[index];
    const key = one.dataset?.key;
    if (key && here?.dataset?.key !== key) {
      const moved = [...shown.children].find((other) => other.dataset.key === key);
      if (moved) { shown.insertBefore(moved, here ?? null); here = moved; }
    }
    if (!here) shown.append(one);
    else if (here.nodeName !== one.nodeName || (key ?? "") !== (here.dataset?.key ?? "")) shown.insertBefore(one, here);
    else if (one.nodeType === Node.TEXT_NODE) { if (here.data !== one.data) here.data = one.data; }
    else morph(here, one);
  });
  while (shown.childNodes.length > wanted.length) shown.lastChild.remove();
}

export const bytes = (size) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (size >= 1000 && step < units.length - 1) { size /= 1024; step += 1; }
  return `${size < 10 && step ? size.toFixed(1) : Math.round(size)} ${units[step]}`;
};
/** A size and the whole that it is a part of, with the unit once where both have the same. */
export const partOf = (part, whole) => {
  const [size, unit] = bytes(part).split(" ");
  return bytes(whole).endsWith(` ${unit}`) ? `${size} of ${bytes(whole)}` : `${size} ${unit} of ${bytes(whole)}`;
};
export const seconds = (s) => {
  if (s === null || s === undefined) return "";
  if (s && s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 99.5) return `${s < 9.95 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 129600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
};
export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
export const count = (number, word, words = `${word}s`) => `${number.toLocaleString("en")} ${number === 1 ? word : words}`;
export const speed = (rate) => `${rate < 9.95 ? rate.toFixed(1) : Math.round(rate)} tokens/s`;
export const joined = (words) => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
export const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
export const median = (numbers) => numbers.length ? [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)] : null;
