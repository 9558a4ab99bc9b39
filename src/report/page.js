// The timeline and the sorting of tables. The data comes from timeline.cc, which says its form;
// its strings are foreign and only ever become textContent or text on the canvas.
'use strict';
(() => {
  // ---- tables ------------------------------------------------------------------------------

  const valueOf = (cell) => {
    if (!cell) return '';
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };

  function sortBy(table, column, heading) {
    const down = heading.getAttribute('aria-sort') !== 'descending';
    for (const other of heading.parentNode.children) other.removeAttribute('aria-sort');
    heading.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = valueOf(a.cells[column]), y = valueOf(b.cells[column]);
      const order = typeof x === 'number' && typeof y === 'number'
          ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true});
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll('table.sortable')) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener('click', () => sortBy(table, column, heading));
    });
  }

  // Paper cannot be clicked: everything is open on it.
  let closed = [];
  addEventListener('beforeprint', () => {
    closed = [...document.querySelectorAll('details:not([open])')];
    for (const details of closed) details.open = true;
  });
  addEventListener('afterprint', () => {
    for (const details of closed) details.open = false;
  });

  // ---- the timeline's data -----------------------------------------------------------------

  const box = document.getElementById('timeline');
  if (!box) return;
  const data = JSON.parse(document.getElementById('weft-data').textContent);

  // A column is an array, or one number that stands for all.
  const column = (values, count) =>
      Array.isArray(values) ? values : new Array(count).fill(values);

  function decode(row) {
    const start = new Float64Array(row.count);
    let at = 0, longest = 0;
    const deltas = column(row.t, row.count);
    const duration = Float64Array.from(column(row.d, row.count));
    for (let i = 0; i < row.count; ++i) {
      at += deltas[i];
      start[i] = at;
      if (duration[i] > longest) longest = duration[i];
    }
    return {rank: row.rank, part: row.part, track: row.track, sub: row.sub, lane: row.lane,
            peer: row.peer, count: row.count, start, duration, longest,
            name: column(row.n, row.count), kind: column(row.k, row.count),
            bytes: column(row.b, row.count), iteration: column(row.i, row.count)};
  }

  const runs = data.runs.map((run) => {
    const ranks = new Map();
    for (const raw of run.rows) {
      if (!ranks.has(raw.rank)) ranks.set(raw.rank, []);
      ranks.get(raw.rank).push(decode(raw));
    }
    return {...run, ranks: [...ranks].map(([rank, rows]) => ({rank, rows, open: false}))};
  });
  const whole = Math.max(1000, ...runs.map((run) => run.to));
  // Up to here all runs have something to show.
  const common = Math.min(whole, ...runs.filter((run) => run.rows.length > 0).map((run) => run.to));

  // The first index at which `values` is not below `limit`.
  function lowerBound(values, limit, from = 0) {
    let low = from, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < limit) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // ---- text --------------------------------------------------------------------------------

  const UNITS = [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs'], [1, 'ns']];

  function timeText(ns, step) {
    const size = Math.max(Math.abs(ns), step || 0);
    const [unit, word] = UNITS.find(([u]) => size >= u) || UNITS[3];
    const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9))
                        : ns === 0 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(size / unit)));
    return `${(ns / unit).toFixed(Math.min(digits, 6))} ${word}`;
  }

  function bytesText(bytes) {
    for (const [unit, word] of [[1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB']])
      if (bytes >= unit) return `${(bytes / unit).toFixed(2)} ${word}`;
    return `${bytes} B`;
  }

  // ---- layout ------------------------------------------------------------------------------

  const canvas = document.getElementById('timeline-canvas');
  const paint = canvas.getContext('2d');
  const space = document.getElementById('timeline-space');
  const tooltip = document.getElementById('tooltip');
  const AXIS = 26, HEAD = 26, GAP = 7;
  const view = {from: 0, to: whole};
  const OPEN = {device: 18, iterations: 10, training: 10, operations: 6, lane_out: 10,
                lane_in: 10, marks: 10};
  let width = 0, height = 0, gutter = 150, total = 0;
  let heads = [];   // bands with a run's label: {run, y, bottom}
  let groups = [];  // ranks: {group, y, bottom}
  let lines = [];   // rows as drawn: {run, row, y, height, label}

  // Closed, a rank is its device, its waits, its operations in one line and its lanes out as thin
  // ones. Open, it is everything.
  function heightOf(row, open, lanes) {
    if (open) return OPEN[row.part];
    if (row.part === 'device') return 14;
    if (row.part === 'training') return 5;
    if (row.part === 'operations') return 6;
    return Math.max(1, Math.min(3, 24 / lanes - 1));
  }
  const ALWAYS = ['device', 'training', 'operations', 'lane_out'];
  const isShown = (row, open) => open || ALWAYS.includes(row.part);

  function layoutRank(run, group, y) {
    const lanes = group.rows.filter((row) => row.part === 'lane_out').length;
    let before = null;
    for (const row of group.rows) {
      if (!isShown(row, group.open)) continue;
      // Overlaps of a closed rank lie over each other: what is asked is whether one was there.
      const over = !group.open && before && before.part === row.part && row.part !== 'lane_out';
      const h = heightOf(row, group.open, lanes);
      if (over) y -= h + 1;
      const label = group.open && row.sub === 0 ? row.track : '';
      lines.push({run, row, y, height: h, label});
      y += h + 1;
      before = row;
    }
    return y;
  }

  function layout() {
    heads = [];
    groups = [];
    lines = [];
    let y = AXIS + 4;
    for (const run of runs) {
      const head = {run, y};
      heads.push(head);
      y += HEAD;
      for (const group of run.ranks) {
        const top = y;
        y = layoutRank(run, group, y);
        // Room for the label, however little the rank has to show.
        y = Math.max(y, top + 18);
        groups.push({group, y: top, bottom: y});
        y += GAP;
      }
      head.bottom = y;
      y += 6;
    }
    total = y;
  }

  function resize() {
    layout();
    const limit = Math.max(320, Math.min(innerHeight * 0.88, 960));
    height = Math.round(Math.min(total, limit));
    box.style.height = `${height + 2}px`;
    space.style.height = `${Math.ceil(total)}px`;
    width = box.clientWidth;
    gutter = width < 700 ? 84 : 150;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    ask();
  }

  // ---- colours -----------------------------------------------------------------------------

  let colours = {}, kindColours = [];
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    colours = {ink: get('--ink'), soft: get('--soft'), line: get('--line'), paper: get('--paper'),
               band: get('--band'), accent: get('--accent'), hover: get('--hover')};
    kindColours = data.kinds.map((kind) =>
        (/^[a-z_]+$/.test(kind) && get(`--k-${kind}`)) || get('--k-other'));
  }

  // ---- drawing -----------------------------------------------------------------------------

  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const SMALL = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  let asked = false;
  let hovered = null;  // {line, index}

  function ask() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  }

  const scale = () => (width - gutter) / (view.to - view.from);
  const xOf = (ns) => gutter + (ns - view.from) * scale();
  const timeAt = (x) => view.from + (x - gutter) / scale();

  function drawRow(line, top) {
    const {row} = line;
    const {start, duration} = row;
    const perNs = scale();
    const instants = row.part === 'marks';
    let i = lowerBound(start, view.from - row.longest);
    // Marks of neighbouring pixels become one rectangle before they are drawn.
    let left = 0, right = -1, colour = '';
    const flush = () => {
      if (right <= left) return;
      paint.fillStyle = colour;
      paint.fillRect(left, top, right - left, line.height);
      right = -1;
    };
    while (i < row.count && start[i] <= view.to) {
      const x = gutter + (start[i] - view.from) * perNs;
      const w = duration[i] * perNs;
      if (x + w < gutter) {
        ++i;
        continue;
      }
      const next = kindColours[row.kind[i]];
      if (w < 1) {
        // All that starts within this pixel is one mark; the search skips the rest of it.
        const pixel = Math.floor(x);
        if (pixel > right || next !== colour) {
          flush();
          left = pixel;
          colour = next;
        }
        right = pixel + (instants ? 1.5 : 1);
        const until = lowerBound(start, view.from + (pixel + 1 - gutter) / perNs, i + 1);
        // A longer one among those still gets its own width.
        do ++i; while (i < until && duration[i] * perNs < 1);
        continue;
      }
      flush();
      drawSpan(row, i, Math.max(x, gutter), Math.min(x + w, width), top, line.height, next);
      ++i;
    }
    flush();
  }

  function drawSpan(row, i, left, right, top, h, colour) {
    const gap = right - left > 4 ? 0.75 : 0;
    paint.fillStyle = colour;
    paint.fillRect(left, top, Math.max(right - left - gap, 0.5), h);
    if (h >= 14 && right - left > 46) drawName(row, i, left, right, top, h);
  }

  function drawName(row, i, left, right, top, h) {
    // The colour says the kind already.
    const kind = `${data.kinds[row.kind[i]]} `;
    const full = data.names[row.name[i]];
    const name = full.startsWith(kind) ? full.slice(kind.length) : full;
    const room = right - left - 8;
    const fits = Math.floor(room / 5.6);
    const shown = name.length > fits ? `${name.slice(0, Math.max(fits - 1, 0))}…` : name;
    if (shown.length < 4) return;
    paint.fillStyle = '#ffffff';
    paint.font = SMALL;
    paint.fillText(shown, left + 4, top + h / 2 + 0.5, room);
  }

  function stepFor(room) {
    const least = (view.to - view.from) * 90 / Math.max(room, 1);
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) || power;
  }

  function drawAxis() {
    paint.fillStyle = colours.paper;
    paint.fillRect(0, 0, width, AXIS);
    paint.fillStyle = colours.line;
    paint.fillRect(0, AXIS - 1, width, 1);
    const step = stepFor(width - gutter);
    paint.font = SMALL;
    paint.textAlign = 'center';
    for (let n = Math.ceil(view.from / step); n * step <= view.to; ++n) {
      const x = xOf(n * step);
      paint.fillStyle = colours.line;
      paint.fillRect(Math.round(x), AXIS - 6, 1, 6);
      paint.fillStyle = colours.soft;
      if (x > gutter + 20 && x < width - 20) paint.fillText(timeText(n * step, step), x, 11);
    }
    paint.textAlign = 'left';
    paint.fillStyle = colours.soft;
    paint.fillText('time', 10, 11);
  }

  function drawGrid() {
    const step = stepFor(width - gutter);
    paint.fillStyle = colours.band;
    for (let n = Math.ceil(view.from / step); n * step <= view.to; ++n)
      paint.fillRect(Math.round(xOf(n * step)), AXIS, 1, height);
  }

  function drawHead(head, shift) {
    const y = head.y - shift;
    if (y > height || head.bottom - shift < AXIS) return;
    paint.fillStyle = colours.band;
    paint.fillRect(0, y, width, HEAD - 6);
    paint.fillStyle = colours.ink;
    paint.font = `600 ${FONT}`;
    const {ms, label: name} = head.run;
    const label = ms > 0 ? `${name}: ${ms.toFixed(ms < 1000 ? 1 : 0)} ms an iteration` : name;
    paint.fillText(label, 10, y + 10, width - 20);
    paint.fillStyle = colours.accent;
    for (const {t} of head.run.iterations) drawBoundary(t, y, head.bottom - shift);
    drawBoundary(head.run.to, y, head.bottom - shift);
  }

  function drawBoundary(t, top, bottom) {
    const x = Math.round(xOf(t));
    if (x < gutter || x > width) return;
    paint.globalAlpha = 0.75;
    paint.fillStyle = colours.accent;
    paint.fillRect(x, top + HEAD - 6, 1, bottom - top - HEAD + 6);
    paint.globalAlpha = 1;
  }

  function drawLabels(shift) {
    for (const {group, y, bottom} of groups) {
      const top = y - shift;
      if (top > height || bottom - shift < AXIS) continue;
      paint.font = FONT;
      paint.fillStyle = colours.ink;
      paint.fillText(`${group.open ? '▾' : '▸'} rank ${group.rank}`, 10, top + 8);
    }
    paint.font = '10px system-ui, sans-serif';
    paint.fillStyle = colours.soft;
    let lowest = -1e9;
    for (const line of lines) {
      const middle = line.y - shift + line.height / 2;
      if (!line.label || gutter < 100 || line.row.part === 'device') continue;
      if (middle < AXIS || middle > height || middle - lowest < 9) continue;
      lowest = middle;
      paint.fillText(line.label, 24, middle, gutter - 32);
    }
  }

  function draw() {
    const shift = box.scrollTop;
    paint.textBaseline = 'middle';
    paint.textAlign = 'left';
    paint.fillStyle = colours.paper;
    paint.fillRect(0, 0, width, height);
    drawGrid();
    paint.save();
    paint.beginPath();
    paint.rect(gutter, AXIS, width - gutter, height - AXIS);
    paint.clip();
    for (const line of lines) {
      const top = line.y - shift;
      if (top > height || top + line.height < AXIS) continue;
      drawRow(line, top);
    }
    drawHovered(shift);
    paint.restore();
    for (const head of heads) drawHead(head, shift);
    drawLabels(shift);
    drawAxis();
    range.textContent = `${timeText(view.to - view.from)} shown`;
  }

  function drawHovered(shift) {
    if (!hovered) return;
    const {line, index} = hovered;
    const x = xOf(line.row.start[index]);
    const w = Math.max(line.row.duration[index] * scale(), 2);
    paint.strokeStyle = colours.hover;
    paint.lineWidth = 1.5;
    paint.strokeRect(x - 0.5, line.y - shift - 0.5, w + 1, line.height + 1);
  }

  // ---- moving ------------------------------------------------------------------------------

  const SMALLEST = 200;  // ns that fill the view at most zoom

  function show(from, to) {
    const span = Math.min(Math.max(to - from, SMALLEST), whole * 1.1);
    // Where the span was cut, the middle stays.
    const middle = (from + to) / 2;
    let start = Math.abs(to - from - span) < 1e-6 ? from : middle - span / 2;
    const margin = whole * 0.05;
    start = Math.min(Math.max(start, -margin), Math.max(whole + margin - span, -margin));
    view.from = start;
    view.to = start + span;
    ask();
  }

  // Around `x`, or else around the middle of what all runs show. Whoever zooms in compares runs, and
  // one of them may be over long before another: some of the time that all have stays in view,
  // unless the view was moved away from it before.
  function zoom(factor, x) {
    const span = view.to - view.from;
    const wanted = Math.min(Math.max(span * factor, SMALLEST), whole * 1.1);
    const start = Math.max(view.from, 0), end = Math.min(view.to, common);
    const shared = end > start;
    const at = x !== undefined ? timeAt(x) : shared ? (start + end) / 2
                                                    : (view.from + view.to) / 2;
    let from = at - (at - view.from) * wanted / span;
    if (shared && factor < 1) from = Math.min(from, common - Math.min(wanted * 0.25, common / 2));
    show(from, from + wanted);
  }

  const pan = (part) => {
    const by = (view.to - view.from) * part;
    show(view.from + by, view.to + by);
  };
  const reset = () => show(-whole * 0.01, whole * 1.01);

  canvas.addEventListener('wheel', (event) => {
    // Over the labels the wheel scrolls, as everywhere.
    if (event.offsetX < gutter) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? height : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      pan((event.deltaX || event.deltaY) * unit / (width - gutter));
    else
      zoom(Math.exp(Math.min(Math.max(event.deltaY * unit, -240), 240) * 0.0025), event.offsetX);
    hide();
  }, {passive: false});

  let drag = null;
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    drag = {x: event.clientX, y: event.clientY, from: view.from, to: view.to,
            scroll: box.scrollTop, moved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', (event) => {
    if (!drag) {
      hover(event);
      return;
    }
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    drag.moved = true;
    canvas.classList.add('dragging');
    hide();
    const by = dx / scale();
    show(drag.from - by, drag.to - by);
    box.scrollTop = drag.scroll - dy;
  });
  const release = (event) => {
    const click = drag && !drag.moved && event.type === 'pointerup';
    drag = null;
    canvas.classList.remove('dragging');
    if (click && event.offsetX < gutter) toggle(event.offsetY + box.scrollTop);
  };
  canvas.addEventListener('pointerup', release);
  canvas.addEventListener('pointercancel', release);
  canvas.addEventListener('pointerleave', () => hide());
  canvas.addEventListener('dblclick', (event) => {
    if (event.offsetX >= gutter) reset();
  });

  function toggle(y) {
    const hit = groups.find((group) => y >= group.y && y < group.bottom + GAP);
    if (!hit) return;
    // The same rank of all runs, since they are there to be compared.
    const open = !hit.group.open;
    for (const {group} of groups) if (group.rank === hit.group.rank) group.open = open;
    hide();
    resize();
  }

  const KEYS = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), '+': () => zoom(0.7), '-': () => zoom(1 / 0.7),
    a: () => pan(-0.15), d: () => pan(0.15), ArrowLeft: () => pan(-0.15),
    ArrowRight: () => pan(0.15), ArrowUp: () => { box.scrollTop -= 60; },
    ArrowDown: () => { box.scrollTop += 60; }, 0: reset, Home: reset,
  };
  canvas.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key] || KEYS[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  box.addEventListener('scroll', ask);

  // ---- what is under the pointer -----------------------------------------------------------

  // The last event of `row` that holds `time`, or the nearest within `slack`.
  function eventAt(row, time, slack) {
    const first = lowerBound(row.start, time - row.longest - slack);
    let best = -1, distance = slack;
    for (let i = lowerBound(row.start, time + slack) - 1; i >= first; --i) {
      const end = row.start[i] + row.duration[i];
      const away = time < row.start[i] ? row.start[i] - time : time > end ? time - end : 0;
      if (away === 0) return i;
      if (away <= distance) {
        best = i;
        distance = away;
      }
    }
    return best;
  }

  function pick(x, y) {
    const slack = 3 / scale();
    let best = null, nearest = 3;
    for (const line of lines) {
      const away = Math.max(line.y - y, y - line.y - line.height, 0);
      if (away > nearest || (best && away === nearest)) continue;
      const index = eventAt(line.row, timeAt(x), slack);
      if (index < 0) continue;
      best = {line, index};
      nearest = away;
    }
    return best;
  }

  function hover(event) {
    if (event.offsetX < gutter || event.offsetY < AXIS) {
      canvas.style.cursor = event.offsetX < gutter && event.offsetY >= AXIS ? 'pointer' : '';
      hide();
      return;
    }
    canvas.style.cursor = '';
    const found = pick(event.offsetX, event.offsetY + box.scrollTop);
    if (!found) {
      hide();
      return;
    }
    if (!hovered || hovered.line !== found.line || hovered.index !== found.index) {
      hovered = found;
      fill(found);
      ask();
    }
    place(event.clientX, event.clientY);
  }

  function fill({line, index}) {
    const {row, run} = line;
    const title = document.createElement('b');
    title.textContent = data.names[row.name[index]];
    const list = document.createElement('dl');
    const add = (key, value) => {
      const term = document.createElement('dt'), text = document.createElement('dd');
      term.textContent = key;
      text.textContent = value;
      list.append(term, text);
    };
    add('start', timeText(row.start[index]));
    add('duration', row.part === 'marks' ? 'a moment' : timeText(row.duration[index]));
    if (row.bytes[index] > 0) add('bytes', bytesText(row.bytes[index]));
    add('rank', row.rank);
    if (row.lane >= 0) add('lane', row.lane);
    if (row.peer >= 0) add(row.part === 'lane_in' ? 'from rank' : 'to rank', row.peer);
    if (row.iteration[index] >= 0) add('iteration', row.iteration[index]);
    add('kind', data.kinds[row.kind[index]].replaceAll('_', ' '));
    add('run', run.label);
    tooltip.replaceChildren(title, list);
    tooltip.hidden = false;
  }

  function place(x, y) {
    const {offsetWidth: w, offsetHeight: h} = tooltip;
    tooltip.style.left = `${Math.max(4, x + 16 + w > innerWidth ? x - w - 12 : x + 16)}px`;
    tooltip.style.top = `${Math.max(4, y + 16 + h > innerHeight ? y - h - 12 : y + 16)}px`;
  }

  function hide() {
    tooltip.hidden = true;
    if (hovered) {
      hovered = null;
      ask();
    }
  }

  // ---- tools, legend, start ----------------------------------------------------------------

  const tools = document.getElementById('timeline-tools');
  const range = document.createElement('output');
  function tool(label, act) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = label;
    button.addEventListener('click', () => act(button));
    tools.append(button);
  }
  tool('Zoom in', () => zoom(0.6));
  tool('Zoom out', () => zoom(1 / 0.6));
  tool('Show all', reset);
  tool('Open all ranks', (button) => {
    const open = groups.some(({group}) => !group.open);
    for (const {group} of groups) group.open = open;
    button.textContent = open ? 'Close all ranks' : 'Open all ranks';
    resize();
  });
  tools.append(range);

  // Kinds in the order of the rows; those that are not named follow.
  const ORDER = ['forward', 'backward', 'update', 'wait', 'operation', 'send', 'receive'];
  const placeOf = (kind) => ORDER.includes(kind) ? ORDER.indexOf(kind) : ORDER.length;
  function legend() {
    const list = document.getElementById('timeline-legend');
    const kinds = data.kinds.map((kind, i) => [kind, i]);
    kinds.sort(([a], [b]) => placeOf(a) - placeOf(b));
    list.replaceChildren(...kinds.map(([kind, i]) => {
      const item = document.createElement('li'), swatch = document.createElement('i');
      swatch.className = 'swatch';
      swatch.style.background = kindColours[i];
      item.append(swatch, kind.replaceAll('_', ' '));
      return item;
    }));
    list.hidden = false;
  }

  function recolour() {
    readColours();
    legend();
    ask();
  }

  tools.hidden = box.hidden = false;
  recolour();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', recolour);
  new ResizeObserver(() => {
    if (box.clientWidth !== width) resize();
  }).observe(box);
  addEventListener('resize', resize);
  addEventListener('beforeprint', recolour);
  resize();
  reset();
  draw();

  // For tests, and for people with a console.
  window.weftTimeline = {
    get from() { return view.from; },
    get to() { return view.to; },
    get rows() {
      return lines.map(({run, row, y, height: h}) => ({
        run: run.label, rank: row.rank, part: row.part, track: row.track, y, height: h,
        count: row.count, start: row.start, duration: row.duration,
      }));
    },
    xOf, show, reset,
  };
})();
