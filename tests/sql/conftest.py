from tests.factory import db as db
from tests.factory import fresh_db as fresh_db
from tests.factory import kept_databases as kept_databases
from tests.factory import session as session
from tests.golden import golden as golden
